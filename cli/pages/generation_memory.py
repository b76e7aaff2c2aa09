"""The memory of a generation over its steps: what was held, and what moved."""

from __future__ import annotations

from chipsparse.cli.pages.axes import fitting, steps_axis
from chipsparse.cli.pages.chart import Box, Chart, Key, Line, Mark, figure, stairs
from chipsparse.cli.pages.elements import Element
from chipsparse.cli.pages.generation_record import NO_LAYERS, GenerationRecord, known
from chipsparse.cli.pages.part import Missing, Section
from chipsparse.cli.pages.units import of_bytes
from chipsparse.common.byte_sizes import format_bytes


def memory_section(record: GenerationRecord) -> Section | Missing:
    """What was held and moved; `Missing` where no caches were recorded."""
    title = "Memory over steps"
    body = [*_held_figures(record), *_moved_figures(record)]
    if not body:
        recorded = any(call.cache_bytes is not None for step in record.steps for call in step.calls)
        return Missing(
            title,
            NO_LAYERS
            if recorded
            else "This report is from a version of chipsparse that did not record it; generate "
            "again.",
        )
    return Section(
        title,
        "What the caches held behind each step and, on a GPU, what PyTorch had allocated there in "
        "all; below, what moved between host memory and the device.",
        body,
    )


def _held_figures(record: GenerationRecord) -> list[Element]:
    rows = (
        ("cache_bytes", "caches, wherever they live", "first", False),
        ("host_bytes", "caches in host memory", "second", True),
        ("allocated_bytes", "allocated on the GPU behind the step", "third", False),
        ("peak_allocated_bytes", "most allocated on the GPU until then", "fourth", True),
    )
    series = {name: _over_steps(record, name) for name, *_ in rows}
    series = {name: values for name, values in series.items() if any(known(values))}
    if not series:
        return []
    values = [value for each in series.values() for value in known(each)]
    unit = of_bytes(values)
    marks = [
        Line(
            stairs([None if each is None else each / unit.size for each in series[name]]),
            class_,
            dashed,
        )
        for name, _, class_, dashed in rows
        if name in series
    ]
    chart = Chart(
        "memory held behind each step",
        steps_axis(record.steps_total),
        fitting(f"memory, {unit.name}", [value / unit.size for value in values]),
        marks,
    )
    keys = [
        Key(class_, label, "dashed" if dashed else "line")
        for name, label, class_, dashed in rows
        if name in series
    ]
    return [figure(chart, caption="Memory held behind each step", keys=keys)]


def _moved_figures(record: GenerationRecord) -> list[Element]:
    moved = [
        (
            step.number,
            sum(call.bytes_to_device for call in step.calls),
            sum(call.bytes_to_host for call in step.calls),
        )
        for step in record.steps
    ]
    if not any(there or back for _, there, back in moved):
        return []
    unit = of_bytes(max(there, back) for _, there, back in moved)
    marks: list[Mark] = []
    for number, there, back in moved:
        for start, amount, class_, label in (
            (number - 0.42, there, "first", "to the device"),
            (number, back, "second", "to host memory"),
        ):
            if amount:
                tip = f"step {number}: {format_bytes(round(amount))} {label}"
                marks.append(Box((start, start + 0.42), (0.0, amount / unit.size), class_, tip))
    chart = Chart(
        "bytes of caches moved at each step",
        steps_axis(record.steps_total),
        fitting(f"moved, {unit.name}", [max(a, b) / unit.size for _, a, b in moved]),
        marks,
        height=230,
    )
    keys = [Key("first", "from host memory to the device"), Key("second", "to host memory")]
    return [figure(chart, caption="Caches moved at each step", keys=keys)]


def _over_steps(record: GenerationRecord, name: str) -> list[float | None]:
    values: list[float | None] = [None] * record.steps_total
    for step in record.steps:
        values[step.number] = step.largest(name)
    return values
