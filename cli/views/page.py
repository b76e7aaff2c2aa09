"""Results as pages: each one HTML file that needs nothing else, not even scripts.

Where drafts are to be chosen, a script of the page itself adds checkboxes.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import itertools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from chipsparse.cli.generate.record import GenerationResult
from chipsparse.cli.generate.report_page import report_sections
from chipsparse.cli.views import sections as view
from chipsparse.cli.views.colours import FIRST, SECOND
from chipsparse.cli.views.frames import Sample, named_samples
from chipsparse.cli.views.names import command_text, without_folders
from chipsparse.cli.views.sections import QualityPoint, Result, Section
from chipsparse.cli.views.units import decibels, shortened, times
from chipsparse.common.version import __version__

if TYPE_CHECKING:
    from chipsparse.cli.views.canvas import Canvas
    from chipsparse.cli.views.charts import Drawn

TEMPLATES = Path(__file__).with_name("templates")
# For Jinja: texts are escaped, and a name that is not there is an error.
STRICT: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined}
STRICT |= {"trim_blocks": True, "lstrip_blocks": True}
LONGEST_TITLE = 80
SPEED = "times as fast as dense"
PSNR = "PSNR against dense, dB"
# Sections that a record leaves to the page, which shows them after the record's own.
PAGE_SECTIONS: dict[type[Result], Callable[[Any], list[Section]]] = {
    GenerationResult: report_sections,
}


@dataclass(frozen=True)
class Frames:
    """Samples of clips, read from the files that a section names."""

    samples: Sequence[Sample]


def page(
    results: Sequence[tuple[Path, Result]],
    *,
    samples: Sequence[Sample] = (),
    images: str = "data:",
) -> str:
    """Return the page of one or several results with the files that they come from.

    ``samples`` are shown with the first result in place of those that it names. ``images`` says
    where the browser may load pictures from.
    """
    numbered = enumerate(results)
    articles = [_article(*pair, samples if n == 0 else ()) for n, pair in numbered]
    sections = [section for article in articles for section in article["sections"]]
    has_drafts = any(isinstance(part, view.Drafts) for each in sections for part in each.parts)
    script = (TEMPLATES / "drafts.js").read_text(encoding="utf-8") if has_drafts else ""
    points = [result.points(file.stem) for file, result in results]
    title = shortened(articles[0]["title"], LONGEST_TITLE) if len(articles) == 1 else ""
    return (
        _environment()
        .get_template("page.html")
        .render(
            articles=articles,
            overview=overview_section(points) if sum(map(bool, points)) > 1 else None,
            title=f"{title} - chipsparse" if title else "chipsparse report",
            images=images,
            script=Markup(script),
            # The browser runs the script of this hash and no other.
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
            version=__version__,
        )
    )


def _article(file: Path, result: Result, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return a result for the template: what it shows, and titles with what would fill them."""
    shown: list[Section] = []
    missing: list[tuple[str, str]] = []
    own = PAGE_SECTIONS.get(type(result))
    for section in (*result.sections(), *([] if own is None else own(result))):
        if section.where == "terminal":
            continue
        parts: list[Any] = []
        text = section.text
        lacking = section.missing
        for part in section.parts:
            if isinstance(part, view.Clips):
                frames = list(samples) or named_samples(file, part)
                if isinstance(frames, str):
                    lacking = frames
                    continue
                parts.append(Frames(frames))
                text = ("" if samples else part.text) + text
            elif part:
                parts.append(part)
        if parts or not section.title or (text and not lacking):
            shown.append(replace(section, parts=parts, text=text))
        elif lacking:
            missing.append((section.title, lacking))
    facts = {"kind": result.kind, "name": file.name, "title": result.title}
    return {**facts, "sections": shown, "missing": missing}


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
            view.Chart("quality over speed", draw, "Quality over speed", 340),
            view.Table(["number in the chart", "speed-up", "PSNR"], rows),
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
    count = itertools.count(1)

    def finalize(value: object) -> object:
        if isinstance(value, str) and not isinstance(value, Markup):
            return without_folders(value)
        return value

    def draw(chart: view.Chart) -> Drawn | None:
        """Return the drawn chart, or None without the library that draws charts."""
        if importlib.util.find_spec("matplotlib") is None:
            return None
        from chipsparse.cli.views.charts import draw_chart

        return draw_chart(chart, f"chart{next(count)}")

    environment = Environment(loader=FileSystemLoader(TEMPLATES), finalize=finalize, **STRICT)
    environment.filters["command"] = command_text
    # A command that is to be copied keeps its folders; as `Markup` no text is cut.
    environment.filters["whole_command"] = lambda words: escape(shlex.join(words))
    environment.tests["kind"] = lambda part, name: type(part).__name__.lower() == name
    environment.globals["draw"] = draw
    return environment
