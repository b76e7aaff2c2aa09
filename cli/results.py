"""What a command found out, on the standard output: for people, or as JSON, from the same record.

A record is a dataclass. Its JSON has its fields by their names, and those named in `also_in_json`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, redirect_stdout
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from chipsparse.common.text_files import readable

if TYPE_CHECKING:
    from rich.console import Console

# Of a field that is for people alone.
NO_JSON = {"in_json": False}

Found = TypeVar("Found")


def results_alone() -> AbstractContextManager[object]:
    """While something works: what it prints is no result, and goes to stderr."""
    return redirect_stdout(sys.stderr)


def tell(found: Found, page: Callable[[Found, Console], None], *, as_json: bool) -> None:
    """Prints a record, or a list of them: by ``page`` for people, or as JSON."""
    if as_json:
        print(json.dumps(json_values(found), indent=2, ensure_ascii=False, allow_nan=False))
        return
    from rich.console import Console

    page(found, Console())


def json_values(value: Any) -> Any:
    """Records as objects, anything that JSON does not have as text; null for a number without end.

    A record with a method ``to_json`` is what that returns; it may start from `fields_json`. Texts
    are as `readable` makes them.
    """
    if hasattr(value, "to_json"):
        return json_values(value.to_json())
    if dataclasses.is_dataclass(value):
        return json_values(fields_json(value))
    if isinstance(value, Mapping):
        return {_text(key): json_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return readable(value)
    return value if value is None or isinstance(value, (bool, int)) else _text(value)


def fields_json(record: Any) -> dict[str, Any]:
    """The fields of a record, and those named in `also_in_json`."""
    own = [each.name for each in dataclasses.fields(record) if each.metadata.get("in_json", True)]
    return {name: getattr(record, name) for name in (*own, *getattr(record, "also_in_json", ()))}


def _text(value: Any) -> str:
    """Of a path, a device, a dtype, or a name."""
    return readable(str(value.value if isinstance(value, Enum) else value)).removeprefix("torch.")
