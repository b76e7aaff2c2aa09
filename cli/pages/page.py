"""The pages: each one HTML file that needs nothing else, not even scripts."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import chipsparse
from chipsparse.cli.batch.record import Batch
from chipsparse.cli.compare.paired_runs import SIDES
from chipsparse.cli.compare.statistics import METRICS
from chipsparse.cli.errors import UserError
from chipsparse.cli.pages.part import Part
from chipsparse.cli.pages.records import QualityPoint
from chipsparse.cli.views.names import command_text, file_name, name_of, without_folders
from chipsparse.cli.views.units import TIMES, decibels, percent, shortened, times
from chipsparse.cli.wording import PART_NAMES, bundled_name, counted, refused_rows, seconds_text
from chipsparse.common.byte_sizes import format_bytes

TEMPLATES = Path(__file__).with_name("templates")
LONGEST_TITLE = 80


def check_library() -> None:
    """Raises `UserError` where the library that draws charts is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "the page needs matplotlib, which is not installed: pip install 'chipsparse[report]'"
        )


def page(parts: Sequence[Part]) -> str:
    """The page of one or several files of results, as text."""
    # Only this page has charts, and only it needs the library that draws them.
    from chipsparse.cli.pages import budget_map, frame_curves, generation_charts, quality_charts
    from chipsparse.cli.pages.charts import Renderer

    charts = {
        "draw": Renderer(),
        "generation": generation_charts,
        "quality": quality_charts,
        "frames": frame_curves,
        "budget_map": budget_map.budget_map,
    }

    def body(part: Part) -> Markup:
        template = _templates().get_template(f"{part.record.kind}.html")
        return Markup(template.render(part=part, record=part.record, missing=[], **charts))

    points = [part.record.points(part.file.stem) for part in parts]
    return (
        _templates()
        .get_template("page.html")
        .render(
            parts=parts,
            bodies=[body(part) for part in parts],
            # The points of all files in one chart, where more than one has any.
            points=numbered(points) if sum(map(bool, points)) > 1 else {},
            **charts,
        )
    )


def numbered(files: Sequence[Sequence[QualityPoint]]) -> dict[str, QualityPoint]:
    """The points of several files by their numbers: that of the file, or 2.1, 2.2 and so on."""
    found = {}
    for number, points in enumerate(files, 1):
        for place, point in enumerate(points, 1):
            found[str(number) if len(points) == 1 else f"{number}.{place}"] = point
    return found


def batch_page(batch: Batch, source: Path) -> str:
    """The page of a batch, which lies beside its files: a thumbnail of each, with its prompt.

    Args:
        source: the file of prompts.
    """
    made = [row for row in batch.rows if row.state in ("made", "already there")]
    return (
        _templates()
        .get_template("batch_page.html")
        .render(
            batch=batch,
            source=source.name,
            model=bundled_name(batch.model) or name_of(batch.model),
            made=made,
            failed=[row for row in batch.rows if row.state == "failed"],
            missing=[row for row in batch.rows if row.state == "missing"],
            settings=list(dict.fromkeys(row.settings for row in batch.rows)),
            seconds=sorted(row.seconds for row in made if row.seconds is not None),
        )
    )


@functools.cache
def _templates() -> Environment:
    """Whatever templates show is escaped, and paths are cut to names."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_named,
        undefined=StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        bytes=format_bytes,
        command=command_text,
        counted=counted,
        decibels=decibels,
        file_name=file_name,
        milliseconds=lambda value: seconds_text(value / 1e3),
        name=name_of,
        percent=percent,
        refused_rows=refused_rows,
        seconds=seconds_text,
        shortened=lambda text: shortened(text, LONGEST_TITLE),
        times=times,
    )
    made.globals.update(
        METRICS=METRICS,
        PART_NAMES=PART_NAMES,
        PASSED="\N{CHECK MARK}",
        SIDES=SIDES,
        TIMES=TIMES,
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        version=chipsparse.__version__,
    )
    return made


def _named(value: Any) -> Any:
    """A text of the page with names in place of paths: it tells nobody who made it, and where."""
    return value if isinstance(value, Markup) else without_folders(str(value))
