"""Classes that stand in for those of libraries, at which these look."""

from __future__ import annotations

BASE = "chipsparse_base"  # names the class that another one stands in for


class StockLike(type):
    """Type of classes that equal the stock one: diffusers looks for a model's class in lists."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or (BASE in vars(cls) and vars(cls)[BASE] is other)

    def __hash__(cls) -> int:
        return hash(vars(cls)[BASE]) if BASE in vars(cls) else type.__hash__(cls)
