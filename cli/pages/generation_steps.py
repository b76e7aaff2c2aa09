"""The steps of a generation: how long each took, and which share of the work it did."""

from __future__ import annotations

from collections.abc import Sequence

from chipsparse.cache.kinds import PARTS
from chipsparse.cli.pages.axes import Axis, fitting, steps_axis
from chipsparse.cli.pages.chart import Box, Chart, Key, Line, Mark, figure, stairs
from chipsparse.cli.pages.elements import Element
from chipsparse.cli.pages.generation_record import (
    ACTIONS,
    PART_TITLES,
    GenerationRecord,
    Step,
    known,
)
from chipsparse.cli.pages.part import Missing, Section, folded, table
from chipsparse.cli.pages.units import of_seconds, percent, tick_percent
from chipsparse.cli.wording import seconds_text
from chipsparse.common.byte_sizes import format_bytes


def steps_section(record: GenerationRecord) -> Section | Missing:
    """Times and shares of the steps; `Missing` where no time was measured."""
    steps, total = record.steps, record.steps_total
    if not any(step.seconds for step in steps):
        return Missing("Steps", "This generation came to the end of no transformer call.")
    unit = of_seconds(step.seconds for step in steps)
    boxes = [
        Box(
            (step.number - 0.42, step.number + 0.42),
            (0.0, step.seconds / unit.size),
            f"action-{step.action}",
            f"step {step.number}, {step.action}: {seconds_text(step.seconds)}",
        )
        for step in steps
        if step.seconds
    ]
    marks: list[Mark] = [*boxes]
    tops = [step.seconds / unit.size for step in steps]
    present = {step.action for step in steps}
    keys = [Key(f"action-{name}", name) for name in ACTIONS if name in present]
    if "dense" in record.denoising_seconds:
        mean = record.denoising_seconds["dense"] / record.steps_asked
        tops.append(mean / unit.size)
        marks.append(Line(stairs([mean / unit.size] * total), "ink", dashed=True))
        keys.append(Key("ink", f"mean step of the dense run, {seconds_text(mean)}", "dashed"))
    chart = Chart(
        "time of each denoising step",
        steps_axis(total),
        fitting(f"time, {unit.name}", tops),
        marks,
    )
    body = [figure(chart, caption="Time of each step", keys=keys)]
    if any(step.cells(part) for step in steps for part in PARTS):
        body.append(_share_figure(steps, total))
    body.append(folded("All steps as a table", _steps_table(steps)))
    return Section(
        "Steps",
        "What every denoising step took, all guidance branches together, and which share of the "
        "work it did. Skipped steps take next to nothing.",
        body,
    )


def _share_figure(steps: Sequence[Step], total: int) -> Element:
    marks: list[Mark] = []
    keys = []
    for part, class_, dashed in (("attention", "first", False), ("mlp", "second", True)):
        shares: list[float | None] = [None] * total
        for step in steps:
            shares[step.number] = step.computed(part)
        if known(shares):
            marks.append(Line(stairs(shares), class_, dashed))
            keys.append(Key(class_, PART_TITLES[part], "dashed" if dashed else "line"))
    chart = Chart(
        "share of attention columns and MLP neurons computed at each step",
        steps_axis(total),
        Axis("computed, mean over layers", 0.0, 1.04, tick_percent),
        marks,
        height=230,
    )
    return figure(chart, caption="Share that each step computed", keys=keys)


def _steps_table(steps: Sequence[Step]) -> Element:
    def share(value: float | None) -> str:
        return "" if value is None else percent(value)

    return table(
        ("step", "action", "time", "attention", "MLP", "to device", "to host"),
        (
            (
                str(step.number),
                step.action_text,
                seconds_text(step.seconds) if step.seconds else "",
                share(step.computed("attention")),
                share(step.computed("mlp")),
                format_bytes(round(sum(call.bytes_to_device for call in step.calls))),
                format_bytes(round(sum(call.bytes_to_host for call in step.calls))),
            )
            for step in steps
        ),
        texts=2,
    )
