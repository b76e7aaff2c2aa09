"""The results of commands: one pydantic record each, which lists once what people see of it.

``--json`` prints the record, files hold it, ``report`` reads it with the same class, and both
renderers, `chipsparse.cli.views.terminal` and `chipsparse.cli.views.page`, show its sections.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict

from chipsparse.common.version import __version__

if TYPE_CHECKING:
    from chipsparse.cli.views.canvas import Canvas

# Neither XML nor HTML has a way to write these.
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def clean(value: object) -> object:
    """Return a text with letters that every encoding and page can hold; any other value as is."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", value) if isinstance(value, str) else value


String = Annotated[str, BeforeValidator(clean)]


@dataclass(frozen=True)
class Tile:
    """A headline number: large on the page, a fact on the terminal."""

    value: str
    label: str
    detail: str = ""


@dataclass(frozen=True)
class Facts:
    """Names with what is to be said of each; rows with an empty text are not shown."""

    rows: Sequence[tuple[str, str]]

    def __bool__(self) -> bool:
        return any(text for _, text in self.rows)


@dataclass(frozen=True)
class Table:
    """A table."""

    columns: Sequence[str]  # headings
    rows: Sequence[Sequence[str]]
    texts: int = 1  # how many of the first columns hold texts; the others hold numbers
    folded: str = ""  # the summary under which the page folds it; empty: it is open

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Alert:
    """A sentence that must not be missed: an "error", or a "note" such as a warning."""

    text: str
    role: Literal["error", "note"] = "note"


@dataclass(frozen=True)
class Items:
    """Sentences, one below the other."""

    texts: Sequence[str]
    heading: str = ""

    def __bool__(self) -> bool:
        return bool(self.texts)


@dataclass(frozen=True)
class Code:
    """Words of a command, which the page shows without folders."""

    words: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.words)


@dataclass(frozen=True)
class Chart:
    """A diagram, for the page alone."""

    title: str  # for those who cannot see it
    draw: Callable[[Canvas], object]  # marks, the labels of both axes, and the legend
    caption: str
    height: int = 280  # pixels, axes included


@dataclass(frozen=True)
class Clips:
    """Videos and images to show frames of, for the page alone."""

    names: Mapping[str, str]  # paths by label
    reference: str | None = None  # label of the clip that another is subtracted from
    side_by_side: bool = False  # each file shows several clips
    beside: bool = False  # the paths count from the folder of the record alone
    text: str = ""  # which clips these are
    missing: str = ""  # how to get clips, where there are none


@dataclass(frozen=True)
class Picture:
    """A file beside the page, with its thumbnail if it has one, and what stands below it."""

    file: str
    thumbnail: str | None
    text: str
    detail: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Gallery:
    """Pictures side by side, for the page alone."""

    pictures: Sequence[Picture]

    def __bool__(self) -> bool:
        return bool(self.pictures)


@dataclass(frozen=True)
class Draft:
    """A draft with its key, and the files that finish it."""

    key: str
    picture: Picture
    finished: Sequence[Picture] = ()


@dataclass(frozen=True)
class Drafts:
    """The drafts of each prompt side by side, to choose which to finish; for the page alone.

    The page shows the words as they are, with folders, so that the command can be copied.
    """

    groups: Sequence[tuple[str, Sequence[Draft]]]  # prompts, each with its drafts
    words: Sequence[str]  # of the command that finishes drafts, but for ``--finish`` and the keys

    def __bool__(self) -> bool:
        return bool(self.groups)


# A part without content is false, and is not shown.
Part: TypeAlias = Tile | Facts | Table | Alert | Items | Code | Chart | Clips | Gallery | Drafts


@dataclass(frozen=True)
class Section:
    """A part of a result."""

    title: str  # empty for the head of the result
    parts: Sequence[Part | None]
    text: str = ""  # below the title, on the page
    where: Literal["both", "terminal", "page"] = "both"
    # What the page says would fill it where no part has anything to show; empty: it is left out.
    missing: str = ""


@dataclass(frozen=True)
class QualityPoint:
    """A result against dense, for the chart over several files."""

    label: str
    speedup: float
    psnr_db: float


class Record(BaseModel):
    """A part of a result; what is not declared is not read."""

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)


class Result(Record):
    """The result of a command."""

    kind: str  # a ``Literal`` of each subclass, by which files are recognized
    chipsparse: String = __version__

    @property
    def title(self) -> str:
        """The headline of the page."""
        raise NotImplementedError

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return what people see, in order; the first section is the head."""
        raise NotImplementedError

    def points(self, name: str) -> list[QualityPoint]:
        """Return the points of a chart over several files, by the file's name."""
        return []

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints, in types of JSON; an infinite number is null."""
        values: dict[str, Any] = json.loads(self.model_dump_json(by_alias=True))
        return values
