"""What `chipsparse bench` measured, as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from chipsparse.cli.bench.benchmark import Benchmark
from chipsparse.cli.bench.layer_times import PartTimes
from chipsparse.cli.bench.step_times import StepTimes
from chipsparse.cli.tables import Facts, facts_table, number_table, print_table
from chipsparse.cli.wording import (
    PART_NAMES,
    counted,
    profile_text,
    seconds_text,
    sharing_text,
    short_place,
)
from chipsparse.common.byte_sizes import format_bytes

ORDER = ("dense", "refresh", "sparse", "skip")
UNEVEN = 0.05


def print_benchmark(found: Benchmark, console: Console) -> None:
    """What ran where, one layer, the steps, and how to run it again."""
    print_table(console, facts_table(_facts(found)))
    if found.layers:
        print_table(console, _layer_table(found.layers))
    if notes := _layer_facts(found):
        print_table(console, facts_table(notes))
    if found.steps is not None:
        alone = "stock" if found.parallel is None else "stock, 1 GPU"
        print_table(console, _step_table(found.steps, alone))
        print_table(console, facts_table(_step_facts(found.steps, found)))
    console.print(" again:", style="bold")
    console.print(f" {found.command}", highlight=False, markup=False, soft_wrap=True)


def _facts(found: Benchmark) -> Facts:
    (height, width), frames = found.pixels, found.settings.num_frames
    size = f"{width}x{height} pixels" + (f", {counted(frames, 'frame')}" if frames else "")
    threads = f", PyTorch on {found.threads} of them" if found.threads else ""
    versions = [f"{name} {version}" for name, version in found.versions.items() if version]
    dtype = str(found.dtype).removeprefix("torch.")
    return [
        ("model", f"{short_place(found.model)} ({found.transformer_class})"),
        ("profile", profile_text(found.profile, found.quality)),
        ("size", f"{size}: {found.tokens:,} tokens, {found.heads} heads of {found.head_dim}"),
        ("device", f"{found.device_name}{threads}, {dtype}"),
        *([] if found.parallel is None else [("GPUs", sharing_text(found.parallel))]),
        ("versions", ", ".join(versions)),
    ]


def _layer_table(layers: list[PartTimes]) -> Table:
    table = number_table(
        "one layer", "kept", "PyTorch", "dense", "refresh", "sparse", "speed-up", gap=1
    )
    several = len({each.kind for each in layers}) > 1
    for each in layers:
        name = PART_NAMES[each.part] + (f", {each.kind}" if several else "")
        times = [_milliseconds(each.milliseconds[action]) for action in ORDER[:3]]
        table.add_row(
            name,
            f"{each.kept / each.total:.1%}",
            _milliseconds(each.baseline_ms),
            *times,
            f"{each.speedup:.2f}x",
        )
    return table


def _milliseconds(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 3}f} ms"


def _layer_facts(found: Benchmark) -> Facts:
    facts: Facts = []
    for part, name in PART_NAMES.items():
        baselines = dict.fromkeys(each.baseline for each in found.layers if each.part == part)
        facts += [("PyTorch", f"{name}: {baseline}") for baseline in baselines]
    errors = [each.error for each in found.layers]
    if errors:
        facts.append(("checked", f"sparse against dense: relative error {max(errors):.0e} or less"))
    backends = {op: backend for each in found.layers for op, backend in each.backends.items()}
    if backends:
        facts.append(("backends", ", ".join(f"{op}: {name}" for op, name in backends.items())))
    return facts + [("dense", reason) for reason in found.dense]


def _step_table(steps: StepTimes, stock: str) -> Table:
    table = number_table("one step", "time", "speed-up", "in a generation", gap=1)
    table.add_row(stock, seconds_text(steps.stock), "1.00x", "")
    for action in dict.fromkeys((*ORDER, *steps.patched)):
        if action in steps.patched:
            seconds = steps.patched[action]
            ratio = "" if action == "skip" else f"{steps.stock / seconds:.2f}x"
            table.add_row(action, seconds_text(seconds), ratio, str(steps.counts.get(action, 0)))
    return table


def _step_facts(steps: StepTimes, found: Benchmark) -> Facts:
    facts: Facts = []
    count, run, speedup = sum(steps.counts.values()), steps.patched_run, steps.speedup_run
    text = "not summed: the run took no step of some action"
    if run is not None and speedup is not None:
        text = (
            f"{counted(count, 'step')}: {seconds_text(run)}, stock "
            f"{seconds_text(steps.stock_run)}: {speedup:.2f} times as fast (summed from these "
            "steps; text encoder and decoder left out)"
        )
    facts.append(("generation", text))
    shares = [
        f"{share:.1%} of the {what}"
        for share, what in ((steps.attention_kept, "columns"), (steps.mlp_kept, "neurons"))
        if share is not None
    ]
    if shares:
        facts.append(("computed", f"{' and '.join(shares)} at a sparse step"))
    if steps.patched_peak_bytes is not None and steps.stock_peak_bytes is not None:
        peaks = [format_bytes(size) for size in (steps.patched_peak_bytes, steps.stock_peak_bytes)]
        facts.append(("memory", f"peak {peaks[0]} on the GPU, stock {peaks[1]}"))
    if found.random_weights:
        facts.append(("weights", "random: times mean something, results would not"))
    facts += uneven_facts(steps)
    return facts + [("fallback", sentence) for sentence in steps.fallbacks]


def uneven_facts(steps: StepTimes) -> Facts:
    """Whether the machine was as fast before the measurement as after it."""
    if abs(steps.stock_after / steps.stock_before - 1) <= UNEVEN:
        return []
    before, after = seconds_text(steps.stock_before), seconds_text(steps.stock_after)
    note = (
        f"stock steps took {before} before the others and {after} after them: this machine's "
        "speed changes, so its ratios are rough"
    )
    return [("note", note)]
