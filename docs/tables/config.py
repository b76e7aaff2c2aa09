"""Every field of a profile, read from the dataclasses that check it."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from chipsparse.profiles.profile import _ProfileFile
from docs.tables.markdown import code, table

COLUMNS = ("field", "type", "default", "allowed", "what it is")
NAMES = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def sections() -> str:
    """A section with a table for each group of fields, in the order of a profile."""
    return "\n\n".join(section(path, cls) for path, cls in groups(_ProfileFile, ""))


def groups(cls: type, path: str) -> Iterator[tuple[str, type]]:
    """A dataclass and all within it, each with its path."""
    yield path, cls
    for item, kind in _fields(cls):
        inner = group_of(kind)
        if inner is not None:
            yield from groups(inner, f"{path}.{item.name}" if path else item.name)


def section(path: str, cls: type) -> str:
    """A heading, what the dataclass says of itself, and its fields."""
    heading = f"### {code(_short(path))}" if path else "### The file"
    rows = [_row(path, item, kind) for item, kind in _fields(cls)]
    text = _sentences(cls) if path else "A profile has these fields, all of which may be left out."
    return f"{heading}\n\n{text}\n\n{table(COLUMNS, rows)}"


def _short(path: str) -> str:
    """A path as `SparsityConfig.override` takes it."""
    return path.removeprefix("sparsity.")


def _sentences(cls: type) -> str:
    """The docstring up to its first section, in Markdown."""
    paragraphs = (cls.__doc__ or "").split("\n\n")
    kept = [" ".join(each.split()) for each in paragraphs if not each.strip().startswith("Raises:")]
    return "\n\n".join(kept).replace("``", "`")


def _fields(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return ((item, hints[item.name]) for item in dataclasses.fields(cls))


def _row(path: str, item: dataclasses.Field[Any], kind: Any) -> tuple[str, ...]:
    help = item.metadata["help"]
    if group_of(kind) is None:
        return (code(item.name), described(kind), _default(item.default), allowed(kind, item), help)
    anchor = _short(f"{path}.{item.name}" if path else item.name).replace(".", "")
    listed = typing.get_origin(kind) is tuple
    text = "list of groups of fields" if listed else "group of fields"
    default = "" if dataclasses.is_dataclass(item.default) else _default(item.default)
    return (code(item.name), text, default, f"[below](#{anchor})", help)


def group_of(kind: Any) -> type | None:
    """The dataclass that a field holds, one or a list of; None for any other field."""
    if typing.get_origin(kind) is not None:
        found = (group_of(each) for each in typing.get_args(kind))
        return next((each for each in found if each is not None), None)
    return kind if dataclasses.is_dataclass(kind) and isinstance(kind, type) else None


def described(kind: Any) -> str:
    """A type in words, as a profile writes its values."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        texts = [described(each) for each in arguments if each is not type(None)]
        return " or ".join(texts + ["null"] * (type(None) in arguments))
    if origin is Literal:
        return "word"
    if origin is dict:
        return "group of fields"
    if origin is tuple:
        return f"list of {described(arguments[0])}s"
    return NAMES[kind]


def allowed(kind: Any, item: dataclasses.Field[Any]) -> str:
    """The bounds of numbers, and all words."""
    low, high = item.metadata["minimum"], item.metadata["maximum"]
    bounds = []
    if high is not None:
        bounds = [f"{low:g} to {high:g}"]
    elif low is not None:
        bounds = [f"at least {low:g}"]
    return ", ".join([*bounds, *(code(word) for word in words(kind))])


def words(kind: Any) -> list[str]:
    """All words that a type allows."""
    if typing.get_origin(kind) is Literal:
        return list(typing.get_args(kind))
    return [word for each in typing.get_args(kind) for word in words(each)]


def _default(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return code("null" if value is None else str(value).lower())
    if isinstance(value, tuple):
        return code(list(value))
    return code(value) if value != "" else "empty"
