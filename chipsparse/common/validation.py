"""Frozen dataclasses that check their own fields, and say exactly which one is wrong.

A field is made with `option`: its default, its help text and its bounds in one place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import reprlib
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")

UNIONS = (typing.Union, types.UnionType)
LARGEST_FLOAT = sys.float_info.max
LARGEST = 2**63 - 1  # that a tensor or a kernel takes
# Values in messages: what somebody passed by mistake may be long, or nested without end.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = 80
_SHORT.maxother = 80


def option(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Return a dataclass field with its help text and inclusive bounds."""
    return field(default=default, metadata={"help": help, "minimum": minimum, "maximum": maximum})


def shown(value: Any) -> str:
    """Return a value in the form of messages: its ``repr``, shortened."""
    try:
        text = " ".join(_SHORT.repr(value).split())
        return text if len(text) <= 200 else f"{text[:200]}..."
    except ValueError:  # Python does not print integers of thousands of digits
        return f"a {type(value).__name__} that is too long to print"


@dataclass(frozen=True)
class Validated:
    """Base of all configs: checks types and bounds of every field when it is made.

    They are dataclasses with ``repr=False``, which leaves the one below.
    """

    def __repr__(self) -> str:
        """The call that makes it, without the fields that have their defaults."""
        changed = [
            f"{item.name}={getattr(self, item.name)!r}"
            for item in dataclasses.fields(self)
            if getattr(self, item.name) != item.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    def __post_init__(self) -> None:
        hints = _hints(type(self))  # type: ignore[arg-type]
        for item in dataclasses.fields(self):
            value = _checked(getattr(self, item.name), hints[item.name], item.name)
            _check_bounds(value, item)
            object.__setattr__(self, item.name, value)


@functools.cache  # to look them up takes most of the time of making a config
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def build(cls: type[T], data: Any, path: str = "") -> T:
    """Return a (nested) frozen dataclass of mappings; errors name the path of what is wrong."""
    names = [item.name for item in dataclasses.fields(cls)]  # type: ignore[arg-type]
    allowed = ", ".join(names)
    if not isinstance(data, Mapping):
        here = path or "the top level"
        raise ValueError(f"{here}: expected a mapping with {allowed}, got {shown(data)}")
    prefix = f"{path}." if path else ""
    for name in data:
        if name not in names:
            raise ValueError(f"{prefix}{name}: unknown field; allowed: {allowed}")
    try:
        return cls(**data)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def _checked(value: Any, kind: Any, path: str) -> Any:
    """Return the value in its declared type (lists become tuples), or raise `ValueError`."""
    value = _unboxed(value)
    origin = typing.get_origin(kind)
    if origin in UNIONS:
        return _of_union(value, kind, path)
    if origin is tuple and isinstance(value, (list, tuple)):
        of_item = typing.get_args(kind)[0]
        return tuple(_checked(item, of_item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return dict(value)
    if _is_plain(value, kind):
        return float(value) if kind is float else value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return build(kind, value, path)
    raise _unexpected(value, kind, path)


def _of_union(value: Any, kind: Any, path: str) -> Any:
    """Return the value in the first of several types that takes it."""
    arguments = typing.get_args(kind)
    if value is None and type(None) in arguments:
        return None
    kinds = [argument for argument in arguments if argument is not type(None)]
    if len(kinds) == 1:  # whose own sentence says more
        return _checked(value, kinds[0], path)
    for one in kinds:
        with contextlib.suppress(ValueError):
            return _checked(value, one, path)
    raise _unexpected(value, kind, path)


def _is_plain(value: Any, kind: Any) -> bool:
    """Return whether a value is of a declared type that has no parts."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if origin is not None:
        return False
    if isinstance(value, bool):  # which is an int, too
        return kind is bool
    if kind is float:
        # A whole number may be beyond all floats.
        return isinstance(value, float) or (isinstance(value, int) and abs(value) <= LARGEST_FLOAT)
    return isinstance(value, kind)


def _unexpected(value: Any, kind: Any, path: str) -> ValueError:
    return ValueError(f"{path}: expected {_describe(kind)}, got {shown(value)}")


def _unboxed(value: Any) -> Any:
    """Return Python's number, bool or text for a scalar of NumPy, which need not be imported."""
    of_numpy = type(value).__module__.partition(".")[0] == "numpy"
    return value.item() if of_numpy and getattr(value, "shape", None) == () else value


def _check_bounds(value: Any, item: dataclasses.Field[Any]) -> None:
    low = item.metadata.get("minimum")
    high = item.metadata.get("maximum")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{item.name}: expected a number below 2^63, got {shown(value)}")
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            continue
        if (low is not None and not number >= low) or (high is not None and not number <= high):
            allowed = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
            raise ValueError(f"{item.name}: expected a number {allowed}, got {shown(number)}")


def _describe(kind: Any) -> str:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in UNIONS:
        return " or ".join(_describe(a) for a in arguments if a is not type(None))
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin is tuple:
        return f"a list ({_describe(arguments[0])} each)"
    if origin is dict:
        return "a mapping"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))
