"""Charts of quality over speed, or over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from chipsparse.cli.compare.paired_runs import SIDES, Side
from chipsparse.cli.pages.charts import (
    FIRST,
    FOURTH,
    SECOND,
    SOFT,
    THIRD,
    Chart,
    dots,
    labels,
    level,
)
from chipsparse.cli.pages.comparison_record import ConfigsComparison
from chipsparse.cli.pages.records import QualityPoint
from chipsparse.cli.pages.suite_record import Suite
from chipsparse.cli.pages.tuning_record import Search, TriedConfig, Tuning
from chipsparse.cli.views.units import times
from chipsparse.cli.wording import counted, seconds_text

SPEED, PSNR = "times as fast as dense", "PSNR against dense, dB"
METHODS = {"chipsparse": FIRST, "MagCache": SECOND, "SeaCache": THIRD}
METRICS = {"psnr_db": PSNR, "ssim": "SSIM", "lpips": "LPIPS"}
FAR_DB = 15.0  # a floor that is so far above everything would press it together


def _axes(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.margins(x=0.06)
    axes.grid()


def overview_chart(points: Mapping[str, QualityPoint]) -> Chart:
    """Several results against their own dense runs, by number, and the line of the best of them."""
    best = best_points(list(points.values()))

    def draw(axes: Axes) -> None:
        _axes(axes, SPEED, PSNR)
        axes.plot(
            [each.speedup for each in best],
            [each.psnr_db for each in best],
            color=FIRST,
            linestyle="--",
        )
        for wanted, colour, label in (
            (True, FIRST, "nothing here is both faster and closer to dense"),
            (False, SECOND, "something here is"),
        ):
            marks = [
                (p.speedup, p.psnr_db, f"{n}: {p.label}: {times(p.speedup)}, {p.psnr_db:.2f} dB")
                for n, p in points.items()
                if (p in best) == wanted
            ]
            dots(axes, marks, colour, label=label, square=not wanted, radius=5)
        labels(axes, [(p.speedup, p.psnr_db, number) for number, p in points.items()])

    return Chart("quality over speed", draw, "Quality over speed", 340)


def best_points(points: Sequence[QualityPoint]) -> list[QualityPoint]:
    """Those that no other one beats in both speed and quality, from the slowest to the fastest."""
    kept: list[QualityPoint] = []
    for point in sorted(points, key=lambda each: (-each.speedup, -each.psnr_db)):
        if not kept or point.psnr_db > kept[-1].psnr_db:
            kept.append(point)
    return kept[::-1]


def configs_chart(record: ConfigsComparison) -> Chart | None:
    """Every prompt of both configs, and their medians; None where nothing differs from dense."""
    if not record.differing:
        return None

    def draw(axes: Axes) -> None:
        _axes(axes, SPEED, PSNR)
        for side, colour in zip(SIDES, (FIRST, SECOND), strict=True):
            square = colour == SECOND
            marks = [
                (run.speedup, psnr, f"{side}, prompt {n}: {times(run.speedup)}, {psnr:.2f} dB")
                for n, run in enumerate(record.runs(side))
                if (psnr := run.psnr_db) is not None
            ]
            dots(axes, marks, colour, square=square, alpha=0.6)
            _cross(axes, record, side, colour, square)
            # The legend shows the configs, also one that has no median.
            label = f"{side}: {record.names[side]}"
            axes.plot([], [], "s" if square else "o", color=colour, label=label)

    return Chart("PSNR over speed-up", draw, "PSNR over speed-up, both against dense", 360)


def _cross(axes: Axes, record: ConfigsComparison, side: Side, colour: str, square: bool) -> None:
    """The median with its intervals, as far as they are finite."""
    speed, quality = (record.estimate(side, name, "median") for name in ("speedup", "psnr_db"))
    if speed is None or quality is None or speed.value is None or quality.value is None:
        return
    if speed.low is not None and speed.high is not None:
        axes.hlines(quality.value, speed.low, speed.high, color=colour, linewidth=1.6)
    if quality.low is not None and quality.high is not None:
        axes.vlines(speed.value, quality.low, quality.high, color=colour, linewidth=1.6)
    tip = f"{side}: median {times(speed.value)}, {quality.value:.2f} dB"
    dots(axes, [(speed.value, quality.value, tip)], colour, square=square, radius=6)


def suite_charts(record: Suite) -> list[Chart]:
    """A chart for each metric that was measured."""
    charts = [_suite_chart(record, metric) for metric in METRICS]
    return [each for each in charts if each is not None]


def _suite_chart(record: Suite, metric: str) -> Chart | None:
    """One metric over speed, a line for each method; None where nothing has both."""
    found = record.measured(metric)
    if not found:
        return None
    floor = None if record.floor is None or record.floor.summary is None else record.floor.summary
    height = None if floor is None else floor.mean(metric)
    far = height is not None and height - max(mean for _, _, mean in found) > FAR_DB

    def draw(axes: Axes) -> None:
        _axes(axes, SPEED, METRICS[metric])
        for method in dict.fromkeys(row.method for row, _, _ in found):
            marks = sorted(
                (speed, mean, f"{row.name}: {times(speed)}, {mean:.4g}")
                for row, speed, mean in found
                if row.method == method
            )
            speeds, means, _ = zip(*marks, strict=True)
            colour = METHODS.get(method, FOURTH)
            axes.plot(speeds, means, color=colour)
            dots(axes, marks, colour, label=method, square=method != "chipsparse", radius=5)
        level(axes, getattr(record.thresholds, metric), "asked for")
        if height is not None and not far:
            level(axes, height, "floor")
        labels(axes, [(speed, mean, row.name.rpartition(" ")[2]) for row, speed, mean in found])

    caption = f"{METRICS[metric]}, over speed-up"
    if far:
        caption += f"; the floor, {height:.2f}, lies far above"
    return Chart(f"{METRICS[metric]} over speed-up", draw, caption, 340)


def tuning_chart(record: Tuning) -> Chart:
    """PSNR over the time of a generation, of every config that was tried."""
    tried = [each for each in record.tried if each.psnrs]
    searches = record.searches.values()
    goals = dict.fromkeys(s.target.min_psnr_db for s in searches if s.target.min_psnr_db)
    dense = record.dense_seconds
    slowest = max([*(each.seconds for each in tried), dense or 0.0])
    limits = [limit for search in searches if (limit := _limit(search, dense)) is not None]
    # A generous one would press all else together.
    limits = [limit for limit in limits if limit <= 1.5 * slowest or not slowest]

    def draw(axes: Axes) -> None:
        _axes(axes, "time of a generation, s", PSNR)
        for limit in limits:
            axes.axvline(limit, color=FOURTH, linestyle="--", label="target")
        if dense is not None:
            label = f"dense, {seconds_text(dense)}"
            axes.axvline(dense, color=SOFT, linestyle="--", label=label)
        for each in tried:
            low, high = min(each.psnrs), max(each.psnrs)
            axes.vlines(each.seconds, low, high, color=SECOND, linewidth=1.6)
        for chosen, colour, label in ((False, SECOND, "tried"), (True, THIRD, "chosen")):
            marks = [
                (each.seconds, min(each.psnrs), _config_text(each))
                for each in tried
                if (each.name in record.chosen) == chosen
            ]
            dots(axes, marks, colour, label=label, square=chosen, radius=6 if chosen else 4)
        for goal in goals:
            level(axes, goal, f"target {goal:g} dB")
        axes.set_xlim(left=0)

    title = "PSNR of configs over the time of a generation"
    return Chart(title, draw, "PSNR over time of every config that was tried", 380)


def _limit(search: Search, dense: float | None) -> float | None:
    """The longest that a generation may take for a search, if it says so."""
    if search.target.min_speedup and dense is not None:
        return dense / search.target.min_speedup
    return search.target.max_seconds


def _config_text(config: TriedConfig) -> str:
    prompts = counted(len(config.pairs), "prompt")
    speedup = "" if config.speedup is None else f", {times(config.speedup)} dense"
    return (
        f"{config.form}: {min(config.psnrs):.2f} dB at worst on {prompts}, "
        f"{seconds_text(config.seconds)}{speedup}"
    )
