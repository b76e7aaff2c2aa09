"""Classes that stand in for those of libraries, which compare classes or their names."""

from __future__ import annotations

from typing import Any

BASE = "chipsparse_base"  # names the class that another one stands in for


class StockLike(type):
    """Type of classes that equal the stock one: diffusers looks for a model's class in lists."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or (BASE in vars(cls) and vars(cls)[BASE] is other)

    def __hash__(cls) -> int:
        return hash(vars(cls)[BASE]) if BASE in vars(cls) else type.__hash__(cls)


def subclass_like(base: type, kind: type[type], *mixins: type, **members: Any) -> type:
    """Return a subclass of a class, under its name.

    Args:
        base: the class.
        kind: the type of the subclass; with another one of `base`, it is of both.
        mixins: further bases, in front of it.
        members: further members.
    """
    if not issubclass(type(base), kind) and not issubclass(kind, type(base)):
        kind = type(kind.__name__, (kind, type(base)), {})  # of an abstract class, for instance
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return kind(base.__name__, (*mixins, base), {**names, BASE: base, **members})
