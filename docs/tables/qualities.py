"""What each class of transformer computes in each named quality, from its profile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from chipsparse.config import Action, ByCost, SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.profiles.profile import QUALITIES, find_profile, profile_classes
from chipsparse.sparse.plan import SparsityPlan
from docs.tables.markdown import table

STEPS = 50
ANY_LAYOUT = ModelLayout((LayerKind("block", 2, 512),), 2, 64, 1, ((4, 8, 8),))
WAN = "WanTransformer3DModel"
TWO_EXPERTS = "Wan 2.2 with two experts"
MOST_NAMES = 3  # in a cell; more are "videos" or "images"
IMAGE_TILE = (1, 8, 16)


def qualities() -> str:
    """Return a row for each quality and each config that some class has for it."""
    rows = []
    configs = effective_configs()
    for quality in QUALITIES:
        classes_of: dict[SparsityConfig, list[str]] = {}
        for name, of_class in configs.items():
            classes_of.setdefault(of_class[quality], []).append(name)
        for config, names in sorted(classes_of.items(), key=lambda item: -len(item[1])):
            rows.append({"quality": f"`{quality}`", "classes": _title(names), **_row(config)})
    media: dict[str, list[str]] = {"Videos": [], "Images": []}
    for name in profile_classes():
        media["Images" if _is_image(name) else "Videos"].append(f"`{name}`")
    lists = "\n".join(f"- {medium}: {', '.join(names)}." for medium, names in media.items())
    return f"{table(rows, texts=4)}\n\n{lists}"


def effective_configs() -> dict[str, Mapping[str, SparsityConfig]]:
    """Return the config of every class and quality; Wan 2.2 has a profile of its own."""
    profiles = {name: find_profile(None, name) for name in profile_classes()}
    profiles[TWO_EXPERTS] = find_profile(None, WAN, experts=2)
    return {name: profile.qualities for name, profile in profiles.items()}


def _row(config: SparsityConfig) -> dict[str, str]:
    by_cost = isinstance(config.schedule.form, ByCost)
    return {
        "columns": f"{config.attention.density:.3g}, {config.attention.delta_rule}",
        "MLP": f"{config.mlp.density}",
        "full + sparse of 50 steps": _steps(config, 0.0),
        "where a sparse step is dear": _steps(config, 1.0) if by_cost else "-",
    }


def _steps(config: SparsityConfig, sparse_cost: float) -> str:
    plan = SparsityPlan(config, ANY_LAYOUT, STEPS, sparse_cost=sparse_cost)
    counts = Counter(plan.actions())
    full = counts[Action.DENSE] + counts[Action.REFRESH]
    sparse = counts[Action.SPARSE]
    return f"{full} + {sparse}" if sparse else f"{full}"


def _title(names: list[str]) -> str:
    if len(names) <= MOST_NAMES:
        return ", ".join(f"`{name}`" if name.endswith("Model") else name for name in names)
    media = {_is_image(name) for name in names if name != TWO_EXPERTS}
    if len(media) == 2:
        return "images and videos"
    return "images" if media == {True} else "videos"


def _is_image(name: str) -> bool:
    return find_profile(None, name).qualities["fast"].tile == IMAGE_TILE
