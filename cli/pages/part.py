"""What the page says of one file: its headline, numbers, sections, and what it has no data for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chipsparse.cli.pages.elements import Child, Element, element


@dataclass(frozen=True)
class Tile:
    """A number of the headline.

    Attributes:
        value: with its unit.
        label: what it is.
        detail: in small print, or None.
    """

    value: str
    label: str
    detail: str | None = None


@dataclass(frozen=True)
class Section:
    """A piece of a part, under a heading.

    Attributes:
        title: the heading.
        text: a sentence or two on what is shown and how to read it.
        body: figures, tables, pictures.
    """

    title: str
    text: str
    body: Sequence[Element]


@dataclass(frozen=True)
class Missing:
    """A section that is left out.

    Attributes:
        title: what it would show.
        how: where its data would come from: a whole sentence.
    """

    title: str
    how: str


@dataclass(frozen=True)
class QualityPoint:
    """A sparse generation, or several, against dense: a point of quality over speed.

    Attributes:
        label: which.
        speedup: times as fast as dense.
        psnr_db: against dense, of the same prompt and seed.
    """

    label: str
    speedup: float
    psnr_db: float


@dataclass(frozen=True)
class Part:
    """All that the page says of one file.

    Attributes:
        kind: what kind of file it is.
        source: its name.
        title: the headline.
        facts: what it is about, by name.
        tiles: the most important numbers.
        sections: with data.
        missing: without.
        alert: what went wrong, or None.
        warnings: what else must not be missed.
        points: for the chart that joins several files.
    """

    kind: str
    source: str
    title: str
    facts: Sequence[tuple[str, str]]
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    missing: Sequence[Missing] = ()
    alert: str | None = None
    warnings: Sequence[str] = ()
    points: Sequence[QualityPoint] = ()


def table(headings: Sequence[str], rows: Iterable[Sequence[Child]], *, texts: int = 1) -> Element:
    """A table of numbers, whose first columns have texts.

    Args:
        headings: one for each column.
        rows: of as many cells.
        texts: how many columns have texts.
    """

    def cells(tag: str, row: Sequence[Child]) -> Element:
        classes = ("text" if place < texts else None for place in range(len(row)))
        pairs = zip(row, classes, strict=True)
        return element("tr", *(element(tag, cell, class_=class_) for cell, class_ in pairs))

    return element(
        "div",
        element(
            "table",
            element("thead", cells("th", headings)),
            element("tbody", *(cells("td", row) for row in rows)),
        ),
        class_="scroll",
        tabindex=0,
    )


def command_section(command: str) -> Section:
    """The command that does the same again."""
    text = "Files are named without their folders."
    body = element("pre", element("code", command))
    return Section("Run it again", text, [body])


def folded(summary: str, *content: Child) -> Element:
    """What is shown when somebody asks for it."""
    return element("details", element("summary", summary), *content)


def facts_list(facts: Sequence[tuple[str, str]]) -> Element:
    """Names, and what is to be said of each."""
    pairs = (
        element("div", element("dt", name), element("dd", text)) for name, text in facts if text
    )
    return element("dl", *pairs, class_="facts")
