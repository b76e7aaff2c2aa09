"""What `chipsparse explain` tells, as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from chipsparse.cache.kinds import PARTS
from chipsparse.cli.explain.explanation import Explanation
from chipsparse.cli.explain.outlook import Outlook
from chipsparse.cli.explain.records import KindLayers, PartLayers
from chipsparse.cli.explain.shared_text import print_shared
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
from chipsparse.config import ranges_text
from chipsparse.cost_model.layer_times import milliseconds_text
from chipsparse.cost_model.run_times import RunEstimate
from chipsparse.kernels.checks import block_count
from chipsparse.plan import Action, SparsityPlan

HIDDEN_ENOUGH = 0.995


def print_explanation(explained: Explanation, console: Console) -> None:
    """The page: the generation, its layers, its memory, its times, and notes."""
    print_table(console, facts_table(_generation_facts(explained)))
    print_table(console, _layer_table(explained))
    if times := _part_time_facts(explained):
        print_table(console, facts_table(times))
    if budgets := _budget_facts(explained):
        print_table(console, facts_table(budgets))
    if reasons := _reason_facts(explained):
        print_table(console, facts_table(reasons))
    if explained.caches:
        print_table(console, _cache_table(explained))
    print_table(console, facts_table(_memory_facts(explained)))
    estimate = explained.outlook.estimate
    if estimate is not None:
        print_table(console, _step_table(explained, estimate))
        if explained.outlook.action_counts["sparse"]:
            print_table(console, _similar_table(estimate))
        print_table(console, facts_table(_time_facts(estimate)))
    if explained.shared is not None:
        print_shared(explained.shared, explained.outlook, console)
    if explained.qualities:
        print_table(console, _quality_table(explained.qualities))
    if explained.notes:
        print_table(console, facts_table([("note", note) for note in explained.notes]))


# What is computed.


def _generation_facts(explained: Explanation) -> Facts:
    planned, plan = explained.planned, explained.planned.plan
    layout, config = plan.layout, plan.config.attention
    height, width = planned.pixels
    size = f"{width}x{height} pixels, "
    if planned.settings.num_frames is not None:
        size += f"{counted(planned.settings.num_frames, 'frame')}, "
    grid = " + ".join("x".join(str(n) for n in grid) for grid in layout.grids)
    tokens = f"{layout.tokens:,}: grid of {grid}"
    if layout.text_tokens:
        also = " and all else, which are exact" if layout.exact_text else ""
        tokens += f", and {layout.text_tokens:,} of text{also}"
    blocks = block_count(len(layout.query_rows), config.block_size_q)
    columns = [group.columns for group in explained.groups]
    again = "; two calls a step for guidance" if planned.branches > 1 else ""
    counts = ", ".join(
        f"{count} {action}" for action, count in explained.outlook.action_counts.items()
    )
    facts = [
        ("model", f"{short_place(explained.model.location)} ({explained.model.transformer_class})"),
        ("profile", profile_text(explained.profile.source, explained.profile.quality)),
        ("size", f"{size}{counted(planned.settings.num_inference_steps, 'step')}{again}"),
        *([] if explained.shared is None else [("GPUs", sharing_text(explained.shared.parallel))]),
        ("tokens", tokens),
        (
            "attention",
            f"{counted(blocks, 'block')} of {config.block_size_q} queries, each keeps "
            f"{_share_text(columns, layout.tokens, 'columns')}",
        ),
    ]
    if config.precision == "fp8":
        facts.append(("", "in 8 bits (int8 and FP8) at dense steps and refreshes"))
    for number, kind in enumerate(explained.layers):
        name = f"{kind.name}: " if len(explained.layers) > 1 else ""
        facts.append(("MLP" if number == 0 else "", name + _mlp_text(kind)))
    return [*facts, ("schedule", counts), *(("", text) for text in _order_texts(plan))]


def _order_texts(plan: SparsityPlan) -> list[str]:
    """The steps in order, or the rule that they follow and those that are computed in full."""
    full = plan.schedule.full_steps
    if full is None:
        return [f"in order: {plan.describe()}"]
    return [plan.describe(), f"in full: {ranges_text(full).replace(',', ', ')}"]


def _share_text(counts: Iterable[int | None], total: int, of: str) -> str:
    """How many of all, and which share; from the least to the most where layers differ."""
    known = sorted(count for count in counts if count is not None)
    if not known:
        return "all of them (dense)"
    least, most = known[0], known[-1]
    if least == most:
        return f"{most:,} {of} ({most / total:.1%})"
    return f"{least:,} to {most:,} {of} ({least / total:.1%} to {most / total:.1%})"


def _budget_facts(explained: Explanation) -> Facts:
    """What each layer keeps, where the profile tells layers apart."""
    plan = explained.planned.plan
    facts: Facts = []
    for kind in explained.layers if plan.config.layers else ():
        for group in kind.keep:
            shares = [
                f"{name} {'dense' if count is None else _share_text([count], total, of)}"
                for name, count, total, of in (
                    ("attention", group.columns, plan.layout.tokens, "columns"),
                    ("MLP", group.neurons, kind.mlp.neurons, "neurons"),
                )
            ]
            name = "" if facts else "keep"
            facts.append((name, f"{group.kind} {group.ranges}: {', '.join(shares)}"))
    return facts


def _mlp_text(kind: KindLayers) -> str:
    mlp = kind.mlp
    neurons = _share_text(
        (group.neurons for group in kind.keep), mlp.neurons, f"of {mlp.neurons:,} neurons"
    )
    blocks = counted(mlp.token_blocks, "block")
    return f"{blocks} of {mlp.block_size} tokens, each recomputes {neurons}"


def _layer_table(explained: Explanation) -> Table:
    table = number_table("layers", "count", "attention", "MLP")
    for kind in explained.layers:
        cells = [_sparse_text(part) for part in (kind.attention, kind.mlp)]
        table.add_row(kind.name, str(kind.layers), *cells)
    return table


def _sparse_text(part: PartLayers) -> str:
    dense = part.dense.total()
    if dense and part.sparse:
        return f"{part.sparse} sparse, {dense} dense"
    return "dense" if dense else "sparse"


def _part_time_facts(explained: Explanation) -> Facts:
    """What a sparse and a dense step of a layer take, each of which may be the faster."""
    facts: Facts = []
    for kind in explained.layers:
        for part in (kind.attention, kind.mlp):
            if part.step is None:
                continue
            facts.append(
                (
                    "" if facts else "one layer",
                    f"{PART_NAMES['mlp' if part is kind.mlp else 'attention']} of {kind.name}: "
                    f"{milliseconds_text(part.step.sparse)} sparse, "
                    f"{milliseconds_text(part.step.dense)} dense (estimated)",
                )
            )
    return facts


def _reason_facts(explained: Explanation) -> Facts:
    facts = []
    for part in PARTS:
        layers = explained.outlook.dense[part]
        for reason in dict.fromkeys(layers.values()):
            count = sum(found == reason for found in layers.values())
            facts.append(("dense", f"{PART_NAMES[part]} of {counted(count, 'layer')}: {reason}"))
    return facts


# Memory.


def _cache_table(explained: Explanation) -> Table:
    on_gpu = explained.target.device.type == "cuda"
    kinds = [kind.name for kind in explained.planned.plan.layout.kinds]
    where = ["on GPU", "on host", "GPU slots"] if on_gpu else []
    table = number_table("cache", *(f"1 {kind}" for kind in kinds), "all", *where, gap=1)
    rows = list(explained.caches.items())
    for name, sizes in rows:
        layer = [_size(sizes.layer.get(kind, 0)) for kind in kinds]
        places = [sizes.device, sizes.host, sizes.slots] if on_gpu else []
        table.add_row(name, *layer, *(_size(size) for size in (sizes.total, *places)))
    table.add_section()
    sums = [
        *(sum(sizes.layer.get(kind, 0) for _, sizes in rows) for kind in kinds),
        sum(sizes.total for _, sizes in rows),
    ]
    if on_gpu:
        memory = explained.memory
        sums += [memory.caches_on_device, memory.caches_on_host, memory.slots]
    table.add_row("all", *(_size(size) for size in sums), style="dim")
    return table


def _memory_facts(explained: Explanation) -> Facts:
    memory = explained.memory
    parts = [
        f"{component.name} {format_bytes(component.nbytes)}"
        for component in explained.weights
        if component.nbytes is not None
    ]
    on_gpu = explained.target.device.type == "cuda"
    name = "GPU" if on_gpu else "memory"
    each = "" if explained.shared is None else ", on each of them"
    of_budget = "" if memory.vram is None else f" of {format_bytes(memory.vram)}"
    facts = [
        ("weights", f"{format_bytes(memory.weights)}: {', '.join(parts)}"),
        ("working", f"about {format_bytes(memory.working)} at most during a step"),
        (
            name,
            f"{format_bytes(memory.device)}{of_budget} for weights, work, caches and slots{each}",
        ),
    ]
    if "residual_scale" in explained.caches:
        facts.append(("residuals", "in FP8 (e4m3) with a scale for each row, half of their bytes"))
    if "token_scale" in explained.caches:
        facts.append(
            ("activations", "in FP8 (e4m3) with a scale for each token, half of their bytes")
        )
    if on_gpu and memory.caches_on_host:
        facts.append(
            ("host", f"{format_bytes(memory.caches_on_host)} of pinned memory for caches{each}")
        )
    kept = sum(sizes.total for sizes in explained.caches.values())
    left = memory.caches_wanted - kept
    if left > 0:
        facts.append(("left out", f"caches of {format_bytes(left)} do not fit"))
    return facts


def _size(count: int) -> str:
    return format_bytes(count) if count else "-"


# Time.


def _step_table(explained: Explanation, estimate: RunEstimate) -> Table:
    against = "against dense" if explained.shared is None else "against dense, 1 GPU"
    table = number_table("action", "steps", "a step", against)
    for name, count in explained.outlook.action_counts.items():
        seconds = estimate.steps[Action(name)]
        speedup = f"{estimate.stock / seconds:.2f}x" if seconds else "-"
        table.add_row(name, str(count), seconds_text(seconds) if seconds else "-", speedup)
    table.add_section()
    steps = str(explained.planned.plan.steps)
    table.add_row("all", steps, seconds_text(estimate.run), f"{estimate.speedup_run:.2f}x")
    return table


def _quality_table(qualities: Mapping[str, Outlook]) -> Table:
    """What each quality would do, side by side."""
    table = number_table("quality", "full", "sparse", "skipped", "work", "caches", "speed-up")
    for name, outlook in qualities.items():
        counts, estimate = outlook.action_counts, outlook.estimate
        table.add_row(
            name,
            str(counts["dense"] + counts["refresh"]),
            str(counts["sparse"]),
            str(counts["skip"]),
            f"{outlook.work:.0%}",
            _size(outlook.cache_bytes),
            "-" if estimate is None else f"{estimate.speedup_run:.2f}x",
        )
    return table


def _similar_table(estimate: RunEstimate) -> Table:
    table = number_table(
        "sparse layers", "attention", "MLP", "other", "all", "transfer", "takes", gap=1
    )
    for layers in estimate.similar:
        moves = layers.to_device, layers.to_host
        time, moved = layers.time, sum(moves)
        seconds = max(moves) / estimate.rates.link_rate(*moves)
        table.add_row(
            f"{layers.layers} {layers.name}",
            *(_milliseconds(part) for part in (time.attention, time.mlp, time.rest, time.total)),
            _size(moved),
            _milliseconds(seconds) if moved else "-",
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _time_facts(estimate: RunEstimate) -> Facts:
    rates = estimate.rates
    facts = []
    if estimate.moving:
        back = f" and {format_bytes(estimate.to_host)} back" if estimate.to_host else ""
        share = (
            "all of it behind"
            if estimate.hidden >= HIDDEN_ENOUGH
            else f"{estimate.hidden:.0%} behind"
        )
        facts.append(
            (
                "transfers",
                f"a sparse step brings {format_bytes(estimate.to_device)}{back} in "
                f"{seconds_text(estimate.moving)}, {share} {seconds_text(estimate.computing)} "
                "of computation",
            )
        )
    source = "measured just now" if rates.measured else "not measured here"
    facts.append(
        (
            "estimate",
            f"denoising alone, compiled blocks, one {rates.device} ({source}): attention "
            f"{rates.attention / 1e12:.0f} and linears {rates.linear / 1e12:.0f} TFLOP/s, memory "
            f"{rates.memory / 1e12:.2f} TB/s, host link {rates.link / 1e9:.0f} GB/s each way",
        )
    )
    return facts
