"""Results as pages: each one HTML file that needs nothing else, not even scripts."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import chipsparse
from chipsparse.cli.errors import UserError
from chipsparse.cli.views.frames import Sample, named_samples
from chipsparse.cli.views.names import command_text, without_folders
from chipsparse.cli.views.sections import (
    FIRST,
    SECOND,
    Alert,
    Chart,
    Clips,
    Code,
    Facts,
    Gallery,
    Items,
    Part,
    QualityPoint,
    Result,
    Section,
    Table,
    Tile,
)
from chipsparse.cli.views.units import decibels, shortened, times

if TYPE_CHECKING:
    from chipsparse.cli.views.charts import Canvas

TEMPLATES = Path(__file__).with_name("templates")
LONGEST_TITLE = 80
SPEED, PSNR = "times as fast as dense", "PSNR against dense, dB"


@dataclass(frozen=True)
class Shown:
    """A section as the template takes it: parts that have something to show, with their kinds."""

    title: str
    text: str
    parts: list[tuple[str, Any]]
    tiles: list[Tile]


@dataclass(frozen=True)
class Article:
    """A result as the template takes it; ``missing`` has titles and what would fill them."""

    kind: str
    name: str
    title: str
    head: Shown
    sections: list[Shown]
    missing: list[tuple[str, str]]


def check_charts() -> None:
    """Raise `UserError` where the library that draws charts is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "the page needs matplotlib, which is not installed: pip install 'chipsparse[report]'"
        )


def page(
    results: Sequence[tuple[Path, Result]],
    *,
    samples: Sequence[Sample] = (),
    title: str = "",
    images: str = "data:",
) -> str:
    """Return the page of one or several results with the files that they come from.

    Args:
        samples: frames to show with the first result in place of those that it names.
        title: of the window; empty: the title of the only result.
        images: where the browser may load pictures from.
    """
    articles = [
        _article(file, result, samples if number == 0 else ())
        for number, (file, result) in enumerate(results)
    ]
    points = [result.points(file.stem) for file, result in results]
    overview = None
    if sum(map(bool, points)) > 1:
        overview = _shown(overview_section(points), Path(), (), [])
    title = title or (shortened(articles[0].title, LONGEST_TITLE) if len(articles) == 1 else "")
    return (
        _environment()
        .get_template("page.html")
        .render(
            articles=articles,
            overview=overview,
            title=f"{title} - chipsparse" if title else "chipsparse report",
            images=images,
            style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
            version=chipsparse.__version__,
        )
    )


def _article(file: Path, result: Result, samples: Sequence[Sample]) -> Article:
    missing: list[tuple[str, str]] = []
    shown = []
    for section in result.sections():
        if section.where != "terminal":
            made = _shown(section, file, samples, missing)
            if made is not None:
                shown.append(made)
    head, *sections = shown
    return Article(result.kind, file.name, result.title, head, sections, missing)


def _shown(
    section: Section, file: Path, samples: Sequence[Sample], missing: list[tuple[str, str]]
) -> Shown | None:
    """Return a section with its charts drawn and its frames read; None where it has nothing."""
    parts: list[tuple[str, Any]] = []
    tiles = [part for part in section.parts if isinstance(part, Tile)]
    text, lacking = section.text, section.missing
    for part in section.parts:
        if part is None or isinstance(part, Tile):
            continue
        if isinstance(part, Clips):
            frames = list(samples) or named_samples(file, part)
            if isinstance(frames, str):
                lacking = frames
                continue
            parts.append(("frames", frames))
            text = ("" if samples else part.text) + text
        elif _has_content(part):
            parts.append((type(part).__name__.lower(), part))
    if not parts and not tiles and section.title:
        if lacking:
            missing.append((section.title, lacking))
            return None
        if not text:
            return None
    return Shown(section.title, text, parts, tiles)


def _has_content(part: Part) -> bool:
    match part:
        case Facts(rows):
            return any(text for _, text in rows)
        case Table(rows=rows):
            return bool(rows)
        case Items(texts):
            return bool(texts)
        case Code(words):
            return bool(words)
        case Gallery(pictures):
            return bool(pictures)
        case Alert() | Chart():
            return True
    return False


def overview_section(points: Sequence[Sequence[QualityPoint]]) -> Section:
    """Return the chart of the points of several files, by the file's number: 1, or 2.1, 2.2."""
    numbered = {
        str(number) if len(of_file) == 1 else f"{number}.{place}": point
        for number, of_file in enumerate(points, 1)
        for place, point in enumerate(of_file, 1)
    }
    best = best_points(list(numbered.values()))

    def draw(canvas: Canvas) -> None:
        canvas.plane(SPEED, PSNR)
        line = [(point.speedup, point.psnr_db) for point in best]
        canvas.axes.plot(*zip(*line, strict=True), color=FIRST, linestyle="--")
        for among, colour, label in (
            (True, FIRST, "nothing here is both faster and closer to dense"),
            (False, SECOND, "something here is"),
        ):
            marks = [
                (p.speedup, p.psnr_db, f"{n}: {p.label}: {times(p.speedup)}, {p.psnr_db:.2f} dB")
                for n, p in numbered.items()
                if (p in best) == among
            ]
            canvas.dots(marks, colour, label=label, square=not among, radius=5)
        canvas.labels([(p.speedup, p.psnr_db, number) for number, p in numbered.items()])

    rows = [
        (f"{number}: {point.label}", times(point.speedup), decibels(point.psnr_db))
        for number, point in sorted(numbered.items(), key=lambda item: -item[1].speedup)
    ]
    return Section(
        "All files",
        [
            Chart("quality over speed", draw, "Quality over speed", 340),
            Table(["number in the chart", "speed-up", "PSNR"], rows),
        ],
        "Every result of these files, by the number of its file, against its own dense run. Files "
        "with other prompts, sizes or step counts are not comparable.",
    )


def best_points(points: Sequence[QualityPoint]) -> list[QualityPoint]:
    """Return the points that no other one beats in both speed and quality, the slowest first."""
    kept: list[QualityPoint] = []
    for point in sorted(points, key=lambda point: (-point.speedup, -point.psnr_db)):
        if not kept or point.psnr_db > kept[-1].psnr_db:
            kept.append(point)
    return kept[::-1]


def _environment() -> Environment:
    """Return the templates' environment: every text is escaped, and paths are cut to names."""
    renderer: Any = None

    def finalize(value: Any) -> Any:
        return value if isinstance(value, Markup) or not isinstance(value, str) else plain(value)

    def plain(text: str) -> str:
        return without_folders(text)

    def draw(chart: Chart) -> Any:
        # Only pages with charts need the library that draws them.
        from chipsparse.cli.views.charts import Renderer

        nonlocal renderer
        renderer = renderer or Renderer()
        return renderer(chart)

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["command"] = command_text
    environment.globals["draw"] = draw
    return environment
