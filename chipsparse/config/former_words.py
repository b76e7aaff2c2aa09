"""Fields of the schedule that are gone, and what they became."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BY_COST = ("sparse_at_most", "skipping")
# Each former field, and its path in the new words.
FORMER = {
    "full_steps": "listed.full",
    "full_share": "spread.full",
    "least_full": "spread.at_least",
    "sparse_steps": "spread.sparse",
    "sparse_at_most": "by_cost.at_most",
    "skipping": "by_cost.skipping",
    "warmup_steps": "periodic.warmup",
    "refresh_every": "periodic.refresh_every",
}
FIRST_DENSE_LAYERS = "first_dense_layers"


def check_former_fields(words: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a schedule in former words, with the same in the new ones."""
    if words.get(FIRST_DENSE_LAYERS) is not None:
        raise ValueError(f"{FIRST_DENSE_LAYERS}: this is now {_dense_layers(words)}")
    former = [name for name in words if name in FORMER or name == FIRST_DENSE_LAYERS]
    if not former:
        return
    new = _translated({name: words[name] for name in former if words[name] is not None})
    instead = f"write {_flow(new)}" if new else "leave it out"
    names = former[0] if len(former) == 1 else f"{', '.join(former[:-1])} and {former[-1]}"
    raise ValueError(f"{former[0]}: a schedule has one form now; in place of {names} {instead}")


def _dense_layers(words: Mapping[str, Any]) -> str:
    count = words[FIRST_DENSE_LAYERS]
    if not isinstance(count, int) or count < 1:
        return "an entry of layers; leave it out"
    last = f"0-{count - 1}" if count > 1 else "0"
    return f"an entry of layers: [{{index: {last}, attention: dense, mlp: dense}}]"


def _translated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return former fields by their new keys, as a mapping of mappings."""
    new: dict[str, Any] = {}
    for name, former in fields.items():
        path = FORMER[name]
        value = former
        if name == "sparse_steps" and ("full_steps" in fields or isinstance(former, (list, tuple))):
            path = "listed.sparse"
            value = "others" if former == 1 else former
        if name == "skipping" and isinstance(former, Mapping):
            value = {_field(key): own for key, own in former.items()}
        form, _, field = path.partition(".")
        if form == "spread" and not fields.keys().isdisjoint(BY_COST):
            new.setdefault("by_cost", {}).setdefault("mixed", {})[field] = value
        else:
            new.setdefault(form, {})[field] = value
    return new


def _field(name: str) -> str:
    """Return the last word of the path that a former field became."""
    return FORMER.get(name, name).rpartition(".")[2]


def _flow(value: object) -> str:
    """Return plain values as YAML on one line."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key}: {{{_flow(own)}}}" if isinstance(own, Mapping) else f"{key}: {_flow(own)}"
            for key, own in value.items()
        )
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(str, value))}]"
    return str(value)
