"""Every field of a profile that people write, read from the dataclasses that check it."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from chipsparse.common.validation import REQUIRED
from chipsparse.config.schedule_forms import (
    FORMS,
    Actions,
    Branches,
    Periodic,
    ScheduleConfig,
    Spread,
)
from chipsparse.profiles.profile import _ProfileFile
from docs.tables.markdown import table

NAMES: dict[object, str] = {bool: "true or false", int: "integer", float: "number", str: "text"}
WRITTEN_BY_TUNE = ("tuned",)
# Forms of a schedule whose only field is not named in YAML.
WITHOUT_GROUP: dict[type, str] = {
    Actions: "list of: `dense`, `refresh`, `sparse`, `skip`",
    Branches: "a form for each branch",
}


def sections() -> str:
    """Return a section with a table for each group of fields, in the order of a profile."""
    return "\n\n".join(section(path, cls) for path, cls in groups(_ProfileFile, ""))


def groups(cls: type, path: str) -> Iterator[tuple[str, type]]:
    """Yield a dataclass and all within it, each with its path; the forms of a schedule by key."""
    yield path, cls
    if cls is ScheduleConfig:
        forms = ((key, form) for key, form in FORMS.items() if form not in WITHOUT_GROUP)
        yield from ((f"{path}.{key}", form) for key, form in forms)
        return
    for item, kind in _fields(cls):
        inner = group_of(kind)
        if inner is not None and item.name not in WRITTEN_BY_TUNE:
            yield from groups(inner, f"{path}.{item.name}" if path else item.name)


def section(path: str, cls: type) -> str:
    """Return a heading, the first sentence of the dataclass's docstring, and its fields."""
    short = path.removeprefix("sparsity.")
    heading = f"### `{short}`" if short else "### The file"
    text = " ".join((cls.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")
    text = text if short else "All fields of a profile may be left out."
    rows = [_row(path, item, kind) for item, kind in _fields(cls) if item.name != "form"]
    if cls is ScheduleConfig:
        rows = [*(_form_row(path, key, form) for key, form in FORMS.items()), *rows]
    return f"{heading}\n\n{text}\n\n{table(rows)}"


def _fields(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return ((item, hints[item.name]) for item in dataclasses.fields(cls))


def _row(path: str, item: dataclasses.Field[Any], kind: object) -> dict[str, str]:
    value = "group"
    default = _default(item.default)
    if group_of(kind) is None:
        value = described(kind, item.metadata["minimum"], item.metadata["maximum"])
    elif item.name not in WRITTEN_BY_TUNE:
        anchor = "schedulespread" if group_of(kind) is Spread else _anchor(path, item.name)
        value = f"[group](#{anchor})"
    return {
        "field": f"`{item.name}`",
        "value": value,
        "default": default,
        "meaning": item.metadata["help"],
    }


def _form_row(path: str, key: str, form: type) -> dict[str, str]:
    """Return the row of one form of a schedule, which has no default of its own."""
    text = " ".join((form.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")
    default = "taken without any" if form is Periodic else ""
    value = f"[group](#{_anchor(path, key)})"
    if form in WITHOUT_GROUP:
        (item, _), *_ = _fields(form)
        text += f" {item.metadata['help']}"
        value = WITHOUT_GROUP[form]
    return {"field": f"`{key}`", "value": value, "default": default, "meaning": text}


def _anchor(path: str, key: str) -> str:
    return f"{path}.{key}".removeprefix(".").removeprefix("sparsity.").replace(".", "")


def group_of(kind: object) -> type | None:
    """Return the dataclass that a field holds, one or a list of; None for any other field."""
    if typing.get_origin(kind) is not None:
        inner = (group_of(argument) for argument in typing.get_args(kind))
        return next((group for group in inner if group is not None), None)
    return kind if dataclasses.is_dataclass(kind) and isinstance(kind, type) else None


def described(kind: object, low: float | None, high: float | None) -> str:
    """Return a type in words, null left out, with the bounds of its numbers."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = (argument for argument in arguments if argument is not type(None))
        return " or ".join(described(argument, low, high) for argument in kinds)
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in arguments)
    if origin is dict:
        return "group"
    if origin is tuple:
        return f"list of: {described(arguments[0], low, high)}"
    if kind in (int, float) and low is not None:
        return f"{NAMES[kind]} ≥ {low:g}" + ("" if high is None else f", ≤ {high:g}")
    return NAMES[kind]


def _default(value: object) -> str:
    if value is REQUIRED:
        return "required"
    if dataclasses.is_dataclass(value) or value == "":
        return ""
    if value is None or isinstance(value, bool):
        return "`null`" if value is None else f"`{value}`".lower()
    return f"`{list(value) if isinstance(value, tuple) else value}`"
