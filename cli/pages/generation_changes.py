"""The predicted change of a generation's output over its steps."""

from __future__ import annotations

from collections.abc import Sequence

from chipsparse.cli.pages.axes import fitting, steps_axis
from chipsparse.cli.pages.chart import Chart, Dots, Level, Line, figure, gaps
from chipsparse.cli.pages.elements import Element
from chipsparse.cli.pages.generation_record import GenerationRecord, Step
from chipsparse.cli.pages.part import Missing, Section
from chipsparse.cli.pages.units import percent, tick_percent


def change_section(record: GenerationRecord) -> Section | Missing:
    """What was predicted of the output at each step; `Missing` where nothing was."""
    title = "Predicted change over steps"
    predicted = [step for step in record.steps if step.largest("predicted_change") is not None]
    if not predicted:
        return Missing(title, "It is there with schedule.skip_threshold in the profile.")
    threshold = record.values.object("config").object("schedule").number_or_none("skip_threshold")
    return Section(
        title,
        "How much the output was predicted to change since it was last computed.",
        [_predicted_figure(predicted, record.steps_total, threshold)],
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
