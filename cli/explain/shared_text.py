"""What `chipsparse explain --gpus` tells of each process, as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from chipsparse.cli.explain.outlook import Outlook
from chipsparse.cli.explain.shared import SharedOutlook
from chipsparse.cli.tables import Facts, facts_table, number_table, print_table
from chipsparse.cli.wording import seconds_text
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.cost_model.layer_times import Rates
from chipsparse.cost_model.run_times import RunEstimate
from chipsparse.plan import Action


def print_shared(shared: SharedOutlook, outlook: Outlook, console: Console) -> None:
    """Prints what each process has, and what the exchanges take."""
    estimate = outlook.estimate
    shown = Action.SPARSE if outlook.action_counts["sparse"] else Action.DENSE
    print_table(console, _rank_table(shared, shown))
    step = f"bytes that a GPU sends and seconds that it computes are of a {shown.value} step"
    facts: Facts = [("rank", step)]
    if estimate is not None and shared.alone.estimate is not None:
        print_table(console, _action_table(shared, outlook, estimate, shared.alone.estimate))
        facts += _facts(estimate.rates)
    print_table(console, facts_table(facts))


def _rank_table(shared: SharedOutlook, shown: Action) -> Table:
    branched = shared.parallel.guidance > 1
    timed = shared.efficiency_run is not None
    headings = ["heads", "tokens", "caches", "sends", *(["computes", "busy"] if timed else [])]
    table = number_table("rank", *(["branch"] if branched else []), *headings)
    for rank in shared.ranks:
        cells = [str(rank.branch)] if branched else []
        cells += [
            str(rank.heads),
            f"{rank.tokens:,}",
            format_bytes(rank.cache_bytes),
            format_bytes(rank.sent_bytes[shown]),
        ]
        if rank.computing is not None and rank.busy is not None:
            cells += [seconds_text(rank.computing[shown]), f"{rank.busy:.0%}"]
        table.add_row(str(rank.rank), *cells)
    return table


def _action_table(
    shared: SharedOutlook, outlook: Outlook, estimate: RunEstimate, alone: RunEstimate
) -> Table:
    table = number_table("action", "exchanged", "in", "a step", "on 1 GPU", "efficiency")
    efficiency = shared.efficiency or {}
    for name in outlook.action_counts:
        action = Action(name)
        most = max(rank.sent_bytes[action] for rank in shared.ranks)
        table.add_row(
            name,
            format_bytes(most) if most else "-",
            seconds_text(estimate.exchanging[action]) if most else "-",
            seconds_text(estimate.steps[action]) if estimate.steps[action] else "-",
            seconds_text(alone.steps[action]) if alone.steps[action] else "-",
            f"{efficiency[action]:.0%}" if action in efficiency else "-",
        )
    table.add_section()
    run = [seconds_text(estimate.run), seconds_text(alone.run), f"{shared.efficiency_run:.0%}"]
    table.add_row("all steps", "", "", *run)
    return table


def _facts(rates: Rates) -> Facts:
    return [
        (
            "exchange",
            f"{rates.peer_link / 1e9:.0f} GB/s each way and {rates.peer_seconds * 1e3:.1f} ms each "
            "(NVLink), as if nothing was computed meanwhile; efficiency is one GPU's time over "
            "that of all",
        )
    ]
