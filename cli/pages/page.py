"""The whole page: one HTML file that needs nothing else, not even scripts."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import chipsparse
from chipsparse.cli.compare.paired_runs import SIDES
from chipsparse.cli.compare.statistics import METRICS
from chipsparse.cli.errors import UserError
from chipsparse.cli.pages.names import command_text, file_name, name_of, without_folders
from chipsparse.cli.pages.part import Part
from chipsparse.cli.pages.quality_points import numbered
from chipsparse.cli.pages.units import TIMES, decibels, percent, shortened, times
from chipsparse.cli.wording import counted, refused_rows, seconds_text
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
    """The page of one or several files, as text."""
    from chipsparse.cli.pages.charts import Renderer

    environment = _environment()
    points = [part.points for part in parts]
    draw = Renderer()

    def body(part: Part) -> Markup:
        template = environment.get_template(f"{part.kind}.html")
        return Markup(template.render(part=part, record=part.record, draw=draw, missing=[]))

    return environment.get_template("page.html").render(
        parts=parts,
        bodies=[body(part) for part in parts],
        draw=draw,
        # The points of all files in one chart, where more than one has any.
        points=numbered(points) if sum(map(bool, points)) > 1 else {},
        version=chipsparse.__version__,
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
    )


@functools.cache
def _environment() -> Environment:
    """With what templates call. Whatever they show is escaped, and paths are cut to names."""
    from chipsparse.cli.pages import budget_map, frame_curves, generation_charts, quality_charts

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_named,
        undefined=StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
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
    environment.globals.update(
        generation=generation_charts,
        quality=quality_charts,
        frames=frame_curves,
        budget_map=budget_map.budget_map,
        METRICS=METRICS,
        SIDES=SIDES,
        TIMES=TIMES,
        PASSED="\N{CHECK MARK}",
    )
    return environment


def _named(value: Any) -> Any:
    """A text of the page with names in place of paths: it tells nobody who made it, and where."""
    return value if isinstance(value, Markup) else without_folders(str(value))
