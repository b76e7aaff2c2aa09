"""The chart of a tuning: quality over time, as it was predicted and as it was verified."""

from __future__ import annotations

from collections.abc import Sequence

from chipsparse.cli.pages.axes import Axis, fitting
from chipsparse.cli.pages.chart import Chart, Dots, Key, Level, Line, Mark, Whisker, figure
from chipsparse.cli.pages.elements import Element
from chipsparse.cli.pages.tuning_record import TuningRecord, VerifiedConfig
from chipsparse.cli.pages.units import times
from chipsparse.cli.summary import seconds_text

# What is predicted is drawn so far above what was measured, and at least so far above that.
MARGIN_DB, LEAST_TOP_DB = 8.0, 40.0


def quality_figure(record: TuningRecord) -> Element:
    """PSNR over the time of a generation: the predicted frontier, and every verified config."""
    newest = record.searches[-1] if record.searches else None
    verified = [each for each in record.verified if each.psnrs]
    measured = [psnr for each in verified for psnr in each.psnrs]
    goals = [s.min_psnr_db for s in record.searches if s.min_psnr_db is not None]
    frontier = [] if newest is None else [(x, y) for x, y, _ in newest.predicted]
    predicted = _shown(frontier, max([*measured, *goals, LEAST_TOP_DB]) + MARGIN_DB)
    dense = record.dense_seconds or (None if newest is None else newest.dense_seconds)
    seconds = [*(x for x, _ in predicted), *(each.seconds for each in verified)]
    if dense is not None:
        seconds.append(dense)
    limits = [
        search.max_seconds
        for search in record.searches
        # A generous limit would press all else together.
        if search.max_seconds is not None and search.max_seconds <= 1.5 * max(seconds)
    ]
    y = fitting(
        "PSNR against dense, dB", [*(y for _, y in predicted), *measured, *goals], zero=False
    )
    upright = [_upright(limit, y, "fourth") for limit in limits]
    if dense is not None:
        upright.append(_upright(dense, y, "muted"))
    chart = Chart(
        "PSNR of configs over the time of a generation",
        fitting("time of a generation, s", [*seconds, *limits]),
        y,
        [*upright, Line(predicted, "first"), *_verified_marks(verified, _chosen_names(record))],
        [Level(goal, f"target {goal:g} dB") for goal in dict.fromkeys(goals)],
        height=380,
    )
    keys = (
        (predicted, Key("first", "predicted", "line")),
        (verified, Key("second", "verified", "dot")),
        (_chosen_names(record), Key("third", "chosen", "square")),
        (dense, Key("muted", f"dense, {seconds_text(dense or 0.0)}", "dashed")),
        (limits, Key("fourth", "target", "dashed")),
    )
    return figure(
        chart,
        caption="PSNR over time: predicted and verified configs",
        keys=[key for there, key in keys if there],
    )


def _chosen_names(record: TuningRecord) -> set[str]:
    return {search.chosen.name for search in record.searches if search.chosen is not None}


def _shown(predicted: list[tuple[float, float]], top: float) -> list[tuple[float, float]]:
    """All but what is predicted to be so close to dense that it would press the rest together."""
    below = [point for point in predicted if point[1] <= top]
    return below if len(below) > 1 else predicted


def _upright(seconds: float, y: Axis, class_: str) -> Line:
    return Line([(seconds, y.low), (seconds, y.high)], class_, dashed=True)


def _verified_marks(verified: Sequence[VerifiedConfig], chosen: set[str]) -> list[Mark]:
    """A mark for each config at its lowest PSNR, and a line up to its highest."""
    marks: list[Mark] = [
        Whisker((each.seconds, min(each.psnrs)), (each.seconds, max(each.psnrs)), "second")
        for each in verified
        if len(each.psnrs) > 1
    ]
    for class_, radius, group in (
        ("second", 4.0, [each for each in verified if each.name not in chosen]),
        ("third", 6.0, [each for each in verified if each.name in chosen]),
    ):
        points = [(each.seconds, min(each.psnrs)) for each in group]
        tips = [_config_text(each) for each in group]
        marks.append(Dots(points, tips, class_, radius, square=class_ == "third"))
    return marks


def _config_text(config: VerifiedConfig) -> str:
    prompts = f"{len(config.pairs)} prompt{'s' * (len(config.pairs) > 1)}"
    speedup = "" if config.speedup is None else f", {times(config.speedup)} dense"
    return (
        f"{config.name}: {min(config.psnrs):.2f} dB at worst on {prompts}, "
        f"{seconds_text(config.seconds)}{speedup}"
    )
