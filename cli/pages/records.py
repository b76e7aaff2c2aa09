"""Files of JSON, read as records: declared types in, one sentence out where a file is damaged."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, ValidationError

from chipsparse.cli.errors import UserError, first_line
from chipsparse.cli.prompts import read_text
from chipsparse.cli.views.units import TIMES

# Neither XML nor HTML has a way to write these.
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")

# Larger than anything that is measured; charts of such numbers overflow.
Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Count = Annotated[int, Field(ge=0, le=10**18)]
# Of a step or a layer, or how many there are; a damaged file must not make a page of them.
Index = Annotated[int, Field(ge=0, lt=100_000)]

Some = TypeVar("Some", bound="Record")


@dataclass(frozen=True)
class Clips:
    """The videos and images that a file of results names.

    Attributes:
        names: of the files, by label; there may be none.
        reference: the label of that from which the other's difference is shown.
        joined: whether each file shows several clips side by side.
        beside: whether the names count from the folder of the record alone.
        about: which clips these are, where that has to be said.
        missing: how to get some, where there are none.
    """

    names: Mapping[str, str]
    reference: str | None = None
    joined: bool = False
    beside: bool = False
    about: str = ""
    missing: str = ""


@dataclass(frozen=True)
class QualityPoint:
    """A sparse generation, or several, against dense.

    Attributes:
        speedup: times as fast as dense.
        psnr_db: against dense, of the same prompt and seed.
    """

    label: str
    speedup: float
    psnr_db: float


class Record(BaseModel):
    """A JSON object; what is not declared is not read."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class FileRecord(Record):
    """A whole file.

    Attributes:
        kind: which; its template has the same name.
        marks: names of values which only this kind has all of.
        always: names of further ones that stand in every file of this kind.
    """

    kind: ClassVar[str]
    marks: ClassVar[frozenset[str]]
    always: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def title(self) -> str:
        """The headline."""

    @property
    def clips(self) -> Clips | None:
        """The videos and images that it names; None for a kind that has none."""
        return None

    def points(self, name: str) -> list[QualityPoint]:
        """For the chart that joins several files, by the file's name; none without a quality."""
        return []


def within(*path_and_default: Any, was: str | None = None) -> Any:
    """A field that stands in objects within the object; at last its default, ... for none.

    Args:
        path_and_default: names down to the field, and its default.
        was: what older files call the first of these names.
    """
    first, *rest, default = path_and_default
    names = [first] if was is None else [first, was]
    return Field(
        default, validation_alias=AliasChoices(*(AliasPath(name, *rest) for name in names))
    )


class Settings(Record):
    """Size and length of what is generated, as far as they are known."""

    width: Count | None = None
    height: Count | None = None
    num_frames: Count | None = None
    num_inference_steps: Index | None = None
    guidance_scale: Number | None = None
    true_cfg_scale: Number | None = None

    @property
    def size(self) -> str:
        """Size and number of frames; empty where they are not known."""
        if self.width is None or self.height is None:
            return ""
        frames = f", {self.num_frames} frames" if self.num_frames else ""
        return f"{self.width}{TIMES}{self.height} pixels{frames}"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; raises `UserError` where there is none."""
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise UserError(f"{path} is no regular file")
        if not path.exists():
            raise UserError(f"the file {path} does not exist")
        content = json.loads(read_text(path, str(path)))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object, which every file of chipsparse is")
    return content


def read_record(kind: type[Some], path: Path, content: dict[str, Any]) -> Some:
    """The record of a file's content; raises `UserError` with the place of what is wrong."""
    try:
        return kind.model_validate(_clean(content))
    except ValidationError as error:
        raise UserError(f"{path} is damaged: {_described(error)}") from error
    except RecursionError as error:
        raise UserError(f"{path} is damaged: it is nested too deeply") from error


def _clean(value: Any) -> Any:
    """The same with texts that a page can hold, and no null in an object: it counts as missing."""
    if isinstance(value, str):
        return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {_clean(name): _clean(each) for name, each in value.items() if each is not None}
    return [_clean(each) for each in value] if isinstance(value, list) else value


def _described(error: ValidationError) -> str:
    """The first mistake, as in ``steps[0].kept is "all"; it should be a valid number``."""
    first = error.errors(include_url=False, include_context=False)[0]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    place = "".join(parts).removeprefix(".") or "the file"
    if first["type"] == "missing":
        return f"{place} is missing"
    found = json.dumps(first["input"], ensure_ascii=False, default=str)
    found = found if len(found) <= 40 else f"{found[:37]}..."
    wanted = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return f"{place} is {found}; {wanted}"
