"""The whole page: one HTML file that needs nothing else, not even scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import chipsparse
from chipsparse.cli.pages.elements import Child, Element, element, rendered
from chipsparse.cli.pages.names import leave_folders_out
from chipsparse.cli.pages.part import Missing, Part, Section, Tile, facts_list
from chipsparse.cli.pages.quality_speed import numbered, points_table, quality_speed_figure
from chipsparse.cli.pages.units import shortened

STYLE = Path(__file__).with_name("style.css")
# No browser will fetch anything for this page, whatever should get into it.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
LONGEST_TITLE = 80


def page(parts: Sequence[Part]) -> str:
    """The page of one or several files, as text."""
    several = len(parts) > 1
    of = "" if several else f"{shortened(parts[0].title, LONGEST_TITLE)} - "
    title = f"{of}chipsparse report"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", STYLE.read_text(encoding="utf-8")),
    )
    body = element(
        "body",
        element(
            "main",
            _contents(parts) if several else None,
            _overview(parts) if several else None,
            *(_part(part, number) for number, part in enumerate(parts, 1)),
        ),
        element("footer", f"chipsparse {chipsparse.__version__}"),
    )
    return rendered(leave_folders_out(element("html", head, body, lang="en"))) + "\n"


def _contents(parts: Sequence[Part]) -> Element:
    titles = (f"{part.source}: {shortened(part.title, LONGEST_TITLE)}" for part in parts)
    links = (
        element("li", element("a", title, href=f"#part-{number}"))
        for number, title in enumerate(titles, 1)
    )
    return element("nav", element("ol", *links), aria_label="Files")


def _overview(parts: Sequence[Part]) -> Child:
    """The points of all files in one chart, where more than one has any."""
    if sum(bool(part.points) for part in parts) < 2:
        return None
    points = numbered([part.points for part in parts])
    text = (
        "Every result of these files, by the number of its file, against its own dense run. Files "
        "about other prompts, sizes or step counts are not comparable."
    )
    return _section(
        Section("All files", text, [quality_speed_figure(points), points_table(points)])
    )


def _part(part: Part, number: int) -> Element:
    return element(
        "article",
        element(
            "header",
            element("p", f"{part.kind}: {part.source}", class_="kind"),
            element("h1", part.title),
            element("p", part.alert, class_="alert", role="alert") if part.alert else None,
            *(element("p", f"Warning: {text}", class_="alert") for text in part.warnings),
            element("div", *(_tile(tile) for tile in part.tiles), class_="tiles"),
            facts_list(part.facts),
        ),
        *(_section(section) for section in part.sections),
        _missing(part.missing),
        id=f"part-{number}",
    )


def _tile(tile: Tile) -> Element:
    return element(
        "div",
        element("strong", tile.value),
        element("span", tile.label),
        element("small", tile.detail) if tile.detail else None,
        class_="tile",
    )


def _section(section: Section) -> Element:
    return element(
        "section",
        element("h2", section.title),
        element("p", section.text) if section.text else None,
        *section.body,
    )


def _missing(missing: Sequence[Missing]) -> Child:
    if not missing:
        return None
    points = (element("li", element("b", f"{each.title}: "), each.how) for each in missing)
    return element(
        "section", element("h2", "Not on this page"), element("ul", *points), class_="missing"
    )
