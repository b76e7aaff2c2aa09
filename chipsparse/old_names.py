"""Names that a config had before: for one release they are read, with a warning.

With the release after it this file goes, and with it the lines that call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

from chipsparse.common.user_warnings import warn_user

T = TypeVar("T")

# Paths of fields, as in `SparsityConfig.override`.
RENAMED = {
    "attention.keep_fraction": "attention.density",
    "attention.group_rows": "attention.block_size_q",
    "attention.local_groups": "attention.local_blocks",
    "mlp.keep_fraction": "mlp.density",
    "mlp.group_rows": "mlp.block_size",
    "token_order.voxel": "tile",
    "LayerKind.mlp_width": "LayerKind.intermediate_size",  # of no config, but its users' layouts
}

# Groups, fields and single values that have no successor, and why.
GONE = {
    "attention.selection": "random columns in place of the best ones were a control for measuring",
    "attention.delta_rule = kept_only": "a control for measuring",
    "attention.delta_rule = reuse": "a control for measuring",
    "mlp.reselect_every": "sparse steps choose their neurons each time",
    "schedule.reselect": "every refresh chooses columns anew, which was 1.3 dB better",
    "schedule.front_load": "full_share lists steps by what it counts to skip them",
    "guard": "refreshing single layers gave less than the same work in whole refreshes",
}

# What `chipsparse` exported, and what takes its place.
CLASSES = {
    "GuardConfig": "SparsityConfig has no guard any more",
    "TokenOrderConfig": "SparsityConfig has tile in place of token_order",
}


class OldNameWarning(FutureWarning):
    """A config uses a name that the next release will not know."""


def tell(said: list[str], where: str = "") -> None:
    """Warns once of all that `renewed` found; says nothing where it found nothing."""
    if said:
        place = f"{where}: " if where else ""
        found = "; ".join(dict.fromkeys(said))
        warn_user(f"{place}{found}. The next release refuses the old names", OldNameWarning)


def renewed(data: Any, said: list[str]) -> Any:
    """A config as nested mappings with the names of now; gone fields are left out.

    Args:
        data: with old or new names; anything but a mapping comes back as it is.
        said: gets a sentence for each old name.

    Raises:
        ValueError: if a field is given under both of its names.
    """
    if not isinstance(data, Mapping):
        return data
    result = _copied(data)
    for old, new in RENAMED.items():
        found = _taken(result, old)
        if found:
            said.append(f"{old} is now {new}")
            _put(result, new, found[0], old)
    for entry, why in GONE.items():
        path, _, value = entry.partition(" = ")
        if _taken(result, path, only=value):
            said.append(f"{entry} is gone and ignored: {why}")
    return result


def nested(path: str, value: Any) -> dict[str, Any]:
    """The mapping in which a value stands at a dotted path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def reads_old_names(group: str = "") -> Callable[[type[T]], type[T]]:
    """Lets a config class take its fields, and show them, under their old names as well.

    Args:
        group: path of the class in a config; empty for the whole config.
    """

    def decorate(cls: type[T]) -> type[T]:
        make = cls.__init__

        @functools.wraps(make)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            said: list[str] = []
            found = renewed(nested(group, kwargs) if group else kwargs, said)
            tell(said)
            make(self, *args, **(found.get(group, {}) if group else found))

        def __getattr__(self: Any, name: str) -> Any:
            path = f"{group}.{name}" if group else name
            below = {old: new for old, new in RENAMED.items() if f"{old}.".startswith(f"{path}.")}
            if not below:
                raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
            tell([f"{old} is now {new}" for old, new in below.items()])
            values = {old: getattr(self, new.rpartition(".")[2]) for old, new in below.items()}
            if path in values:
                return values[path]
            return SimpleNamespace(**{old.rpartition(".")[2]: x for old, x in values.items()})

        cls.__init__ = __init__  # type: ignore[method-assign]
        cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
        return cls

    return decorate


def old_class(name: str) -> type[SimpleNamespace]:
    """What takes the place of a class that `chipsparse` exported: it takes any fields."""
    tell([f"{name}: {CLASSES[name]}"])
    return SimpleNamespace


def _copied(data: Any) -> Any:
    if isinstance(data, SimpleNamespace):  # of an `old_class`
        data = vars(data)
    if not isinstance(data, Mapping):
        return data
    return {name: _copied(value) for name, value in data.items()}


def _taken(data: dict[str, Any], path: str, only: str = "") -> list[Any]:
    """Removes what stands at a path, and the group that it leaves empty; a list of at most one.

    Args:
        data: changed in place.
        path: of the field.
        only: the text of the only value that is removed; empty for any.
    """
    name, _, rest = path.partition(".")
    if name not in data:
        return []
    if not rest:
        wanted = not only or (isinstance(data[name], str) and data[name] == only)
        return [data.pop(name)] if wanted else []
    found = _taken(data[name], rest, only) if isinstance(data[name], dict) else []
    if found and not data[name]:
        del data[name]
    return found


def _put(data: dict[str, Any], path: str, value: Any, old: str) -> None:
    *groups, name = path.split(".")
    for group in groups:
        data = data.setdefault(group, {})
    if name in data:
        raise ValueError(f"{old} is now {path}: leave one of them out")
    data[name] = value
