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
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar

if TYPE_CHECKING:
    from typing import Self

T = TypeVar("T")
V = TypeVar("V", bound="Validated")

UNIONS = (typing.Union, types.UnionType)
LARGEST_FLOAT = sys.float_info.max
LARGEST = 2**63 - 1  # that a tensor or a kernel takes
REQUIRED: Any = dataclasses.MISSING  # in place of a default
# Values in messages: what somebody passed by mistake may be long, or nested without end.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = 80
_SHORT.maxother = 80


def option(
    default: T,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    former: Mapping[str, str] | None = None,
) -> T:
    """Return a dataclass field.

    Args:
        default: its default, or `REQUIRED`.
        help: the effect and the range of the field.
        minimum: the lowest number.
        maximum: the highest number.
        former: words that it took once, and the word that each became.
    """
    facts = {"help": help, "minimum": minimum, "maximum": maximum, "former": former or {}}
    return field(default=default, metadata=facts)


def assert_never(value: NoReturn) -> NoReturn:
    """Raises for a case that was forgotten, which mypy finds first."""
    raise AssertionError(f"unexpected {value!r}")


def shown(value: object) -> str:
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

    # Fields that had other names once, by these.
    FORMER_NAMES: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *_: object, **named: object) -> Self:
        """Refuse former names before Python does, in a sentence that has the new ones."""
        cls.check_former_names(named)
        return super().__new__(cls)

    @classmethod
    def check_former_names(cls, words: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a field in a former word, with what it became."""
        for name in words:
            if name in cls.FORMER_NAMES:
                raise ValueError(f"{name}: its name is now {cls.FORMER_NAMES[name]}")

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
            value = getattr(self, item.name)
            _check_former(value, item)
            value = _checked(value, hints[item.name], item.name)
            _check_bounds(value, item)
            object.__setattr__(self, item.name, value)

    def words(self) -> dict[str, Any]:
        """Return plain values, from which `read` makes an equal object."""
        return {item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self)}

    @classmethod
    def read(cls, words: Mapping[str, Any]) -> Self:
        """Return the object of plain values.

        Raises:
            ValueError: for a field that is missing, unknown, or not of its type; the message
                begins with the field's path.
        """
        cls.check_former_names(words)
        names = [item.name for item in dataclasses.fields(cls)]
        for name in words:
            if name not in names:
                raise ValueError(f"{name}: unknown field; allowed: {', '.join(names)}")
        for item in dataclasses.fields(cls):
            if item.default is REQUIRED and item.name not in words:
                raise ValueError(f"{item.name}: missing, and it has no default")
        return cls(**words)


def _plain(value: object) -> object:
    if isinstance(value, Validated):
        return value.words()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


@functools.cache  # to look them up takes most of the time of making a config
def _hints(cls: object) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def build(cls: type[V], data: object, path: str = "") -> V:
    """Return a (nested) frozen dataclass of mappings; errors name the path of what is wrong."""
    if not isinstance(data, Mapping):
        allowed = ", ".join(item.name for item in dataclasses.fields(cls))
        here = path or "the top level"
        raise ValueError(f"{here}: expected a mapping with {allowed}, got {shown(data)}")
    prefix = f"{path}." if path else ""
    try:
        return cls.read(data)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def _checked(value: object, kind: object, path: str) -> object:
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
        return float(value) if kind is float and isinstance(value, (int, float)) else value
    if isinstance(kind, type) and issubclass(kind, Validated):
        return build(kind, value, path)
    raise _unexpected(value, kind, path)


def _of_union(value: object, kind: object, path: str) -> object:
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


def _is_plain(value: object, kind: object) -> bool:
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
    return isinstance(kind, type) and isinstance(value, kind)


def _unexpected(value: object, kind: object, path: str) -> ValueError:
    return ValueError(f"{path}: expected {_describe(kind)}, got {shown(value)}")


def _unboxed(value: object) -> object:
    """Return Python's number, bool or text for a scalar of NumPy, which need not be imported."""
    of_numpy = type(value).__module__.partition(".")[0] == "numpy"
    if of_numpy and hasattr(value, "item") and getattr(value, "shape", None) == ():
        unboxed: object = value.item()
        return unboxed
    return value


def _check_former(value: object, item: dataclasses.Field[Any]) -> None:
    """Raises `ValueError` for a word that a field took once."""
    former = item.metadata["former"]
    if isinstance(value, str) and value in former:
        raise ValueError(f"{item.name}: {value} is now {former[value]}")


def _check_bounds(value: object, item: dataclasses.Field[Any]) -> None:
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


def _describe(kind: object) -> str:
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
    names: dict[object, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
    }
    return names.get(kind, getattr(kind, "__name__", str(kind)))
