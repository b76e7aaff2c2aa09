"""The chart of a tuning: quality over the time of a generation."""

from __future__ import annotations

from collections.abc import Sequence

from chipsparse.cli.pages.axes import Axis, fitting
from chipsparse.cli.pages.chart import Chart, Dots, Key, Level, Line, Mark, Whisker, figure
from chipsparse.cli.pages.elements import Element
from chipsparse.cli.pages.tuning_record import Search, TriedConfig, TuningRecord
from chipsparse.cli.pages.units import times
from chipsparse.cli.wording import seconds_text


def quality_figure(record: TuningRecord) -> Element:
    """PSNR over the time of a generation, of every config that was tried."""
    tried = [each for each in record.tried if each.psnrs]
    measured = [psnr for each in tried for psnr in each.psnrs]
    goals = [s.min_psnr_db for s in record.searches if s.min_psnr_db is not None]
    dense = record.dense_seconds
    seconds = [each.seconds for each in tried]
    if dense is not None:
        seconds.append(dense)
    limits = [limit for search in record.searches if (limit := _limit(search, dense)) is not None]
    # A generous one would press all else together.
    limits = [limit for limit in limits if limit <= 1.5 * max(seconds, default=limit)]
    y = fitting("PSNR against dense, dB", [*measured, *goals], zero=False)
    upright = [_upright(limit, y, "fourth") for limit in limits]
    if dense is not None:
        upright.append(_upright(dense, y, "muted"))
    chart = Chart(
        "PSNR of configs over the time of a generation",
        fitting("time of a generation, s", [*seconds, *limits]),
        y,
        [*upright, *_marks(tried, _chosen_names(record))],
        [Level(goal, f"target {goal:g} dB") for goal in dict.fromkeys(goals)],
        height=380,
    )
    keys = (
        (tried, Key("second", "tried", "dot")),
        (_chosen_names(record), Key("third", "chosen", "square")),
        (dense, Key("muted", f"dense, {seconds_text(dense or 0.0)}", "dashed")),
        (limits, Key("fourth", "target", "dashed")),
    )
    return figure(
        chart,
        caption="PSNR over time of every config that was tried",
        keys=[key for there, key in keys if there],
    )


def _limit(search: Search, dense: float | None) -> float | None:
    """The longest that a generation may take for a search, if it says so."""
    if search.min_speedup and dense is not None:
        return dense / search.min_speedup
    return search.max_seconds


def _chosen_names(record: TuningRecord) -> set[str]:
    return {search.chosen.name for search in record.searches if search.chosen is not None}


def _upright(seconds: float, y: Axis, class_: str) -> Line:
    return Line([(seconds, y.low), (seconds, y.high)], class_, dashed=True)


def _marks(tried: Sequence[TriedConfig], chosen: set[str]) -> list[Mark]:
    """A mark for each config at its lowest PSNR, and a line up to its highest."""
    marks: list[Mark] = [
        Whisker((each.seconds, min(each.psnrs)), (each.seconds, max(each.psnrs)), "second")
        for each in tried
        if len(each.psnrs) > 1
    ]
    for class_, radius, group in (
        ("second", 4.0, [each for each in tried if each.name not in chosen]),
        ("third", 6.0, [each for each in tried if each.name in chosen]),
    ):
        points = [(each.seconds, min(each.psnrs)) for each in group]
        tips = [_config_text(each) for each in group]
        marks.append(Dots(points, tips, class_, radius, square=class_ == "third"))
    return marks


def _config_text(config: TriedConfig) -> str:
    prompts = f"{len(config.pairs)} prompt{'s' * (len(config.pairs) > 1)}"
    speedup = "" if config.speedup is None else f", {times(config.speedup)} dense"
    return (
        f"{config.form}: {min(config.psnrs):.2f} dB at worst on {prompts}, "
        f"{seconds_text(config.seconds)}{speedup}"
    )
