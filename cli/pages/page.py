"""The whole page: one HTML file that needs nothing else, not even scripts."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

from jinja2 import Environment
from markupsafe import Markup

from chipsparse.cli.compare.paired_runs import SIDES
from chipsparse.cli.compare.statistics import METRICS
from chipsparse.cli.errors import UserError
from chipsparse.cli.pages.environment import environment
from chipsparse.cli.pages.names import command_text, file_name, name_of
from chipsparse.cli.pages.part import Part
from chipsparse.cli.pages.quality_points import numbered
from chipsparse.cli.pages.units import TIMES, percent
from chipsparse.cli.wording import refused_rows, seconds_text


def check_library() -> None:
    """Raises `UserError` where the library that draws charts is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "the page needs matplotlib, which is not installed: pip install 'chipsparse[report]'"
        )


def page(parts: Sequence[Part]) -> str:
    """The page of one or several files, as text."""
    from chipsparse.cli.pages.charts import Renderer

    templates = _environment()
    points = [part.points for part in parts]
    draw = Renderer()

    def body(part: Part) -> Markup:
        template = templates.get_template(f"{part.kind}.html")
        return Markup(template.render(part=part, record=part.record, draw=draw, missing=[]))

    return templates.get_template("page.html").render(
        parts=parts,
        bodies=[body(part) for part in parts],
        draw=draw,
        # The points of all files in one chart, where more than one has any.
        points=numbered(points) if sum(map(bool, points)) > 1 else {},
    )


@functools.cache
def _environment() -> Environment:
    """With what the templates of files of results call."""
    from chipsparse.cli.pages import budget_map, frame_curves, generation_charts, quality_charts

    found = environment()
    found.filters.update(
        command=command_text,
        file_name=file_name,
        milliseconds=lambda value: seconds_text(value / 1e3),
        name=name_of,
        percent=percent,
        refused_rows=refused_rows,
    )
    found.globals.update(
        generation=generation_charts,
        quality=quality_charts,
        frames=frame_curves,
        budget_map=budget_map.budget_map,
        METRICS=METRICS,
        SIDES=SIDES,
        TIMES=TIMES,
        PASSED="\N{CHECK MARK}",
    )
    return found
