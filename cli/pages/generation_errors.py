"""The errors of a generation over its steps: what the guard measured, what was predicted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from chipsparse.cli.pages.axes import fitting, steps_axis
from chipsparse.cli.pages.chart import Chart, Dots, Key, Level, Line, Mark, Point, figure, gaps
from chipsparse.cli.pages.elements import Element
from chipsparse.cli.pages.generation_record import GenerationRecord, Step
from chipsparse.cli.pages.part import Missing, Section, folded, table
from chipsparse.cli.pages.units import percent, tick_percent

WORST_LAYERS = 5


def error_section(record: GenerationRecord) -> Section | Missing:
    """Errors of sparse attention, and predicted changes of the output; `Missing` without any."""
    title = "Error over steps"
    config = record.values.object("config")
    body = []
    measured = [step for step in record.steps if step.errors]
    if measured:
        body.append(_guard_figure(measured, record, config.object("guard").number_or_none("bound")))
        body.append(folded("The layers with the largest errors", _worst_table(measured)))
    predicted = [step for step in record.steps if step.largest("predicted_change") is not None]
    if predicted:
        threshold = config.object("schedule").number_or_none("skip_threshold")
        body.append(_predicted_figure(predicted, record.steps_total, threshold))
    if not body:
        return Missing(
            title,
            "Set guard.bound in the profile to have the error of sparse attention measured (a "
            "bound of 10 measures and changes nothing), or schedule.skip_threshold to have the "
            "change of the output predicted.",
        )
    return Section(
        title,
        "How far sparse attention was from exact attention, in the query groups that the error "
        "guard sampled, and what was predicted of the output. An error of 0.1 is a tenth of the "
        "exact result's norm.",
        body,
    )


def _guard_figure(
    measured: Sequence[Step], record: GenerationRecord, bound: float | None
) -> Element:
    largest = [(float(step.number), max(step.errors.values())) for step in measured]
    median = [(float(step.number), statistics.median(step.errors.values())) for step in measured]
    tips = [_largest_text(step) for step in measured]
    values = [value for _, value in largest]
    # A bound far above all errors, which only measures, would press them to the ground.
    shown = bound is not None and bound <= 3 * max(values)
    levels = [Level(bound, f"bound {bound:g}")] if shown and bound is not None else []
    marks: list[Mark] = [
        Line(_joined(record, dict(largest)), "second"),
        Dots(largest, tips, "second"),
        Line(_joined(record, dict(median)), "first", dashed=True),
        Dots(median, [f"step {x:g}: median {y:.3f}" for x, y in median], "first", square=True),
    ]
    refreshed = sum(len(call.early_refreshes) for step in record.steps for call in step.calls)
    chart = Chart(
        "error of sparse attention at each step",
        steps_axis(record.steps_total),
        fitting("relative error", [*values, *(level.value for level in levels)]),
        marks,
        levels,
    )
    return figure(
        chart,
        caption=f"Error of sparse attention; early refreshes of layers: {refreshed}",
        keys=[
            Key("second", "largest of all layers", "dot"),
            Key("first", "median of the layers", "square"),
        ],
    )


def _joined(record: GenerationRecord, values: dict[float, float]) -> list[Point | None]:
    """Values of steps, joined over skipped steps, but not over those that computed all."""
    points: list[Point | None] = []
    for step in record.steps:
        if step.number in values:
            points.append((float(step.number), values[step.number]))
        elif step.action != "skip":
            points.append(None)
    return points


def _largest_text(step: Step) -> str:
    layer = max(step.errors, key=lambda each: step.errors[each])
    return f"step {step.number}: largest {step.errors[layer]:.3f}, in layer {layer}"


def _worst_table(measured: Sequence[Step]) -> Element:
    by_layer: dict[int, list[tuple[float, int]]] = {}
    for step in measured:
        for layer, error in step.errors.items():
            by_layer.setdefault(layer, []).append((error, step.number))
    worst = sorted(by_layer, key=lambda layer: -max(by_layer[layer])[0])[:WORST_LAYERS]
    return table(
        ("layer", "largest error", "at step", "median"),
        (
            (
                str(layer),
                f"{max(by_layer[layer])[0]:.3f}",
                str(max(by_layer[layer])[1]),
                f"{statistics.median(error for error, _ in by_layer[layer]):.3f}",
            )
            for layer in worst
        ),
    )


def _predicted_figure(steps: Sequence[Step], total: int, threshold: float | None) -> Element:
    points = [(float(step.number), step.largest("predicted_change") or 0.0) for step in steps]
    tips = [
        f"step {step.number}, {step.action}: {percent(y)}"
        for step, (_, y) in zip(steps, points, strict=True)
    ]
    levels = [] if threshold is None else [Level(threshold, f"threshold {percent(threshold)}")]
    chart = Chart(
        "predicted change of the output at each step",
        steps_axis(total),
        fitting(
            "predicted change",
            [*(y for _, y in points), *(x.value for x in levels)],
            text=tick_percent,
        ),
        [Line(gaps(points), "first"), Dots(points, tips, "first")],
        levels,
        height=230,
    )
    return figure(chart, caption="Predicted change of the output since it was last computed")
