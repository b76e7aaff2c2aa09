"""A report in a few lines: what was done, what share of the work that was, and what ran dense."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from chipsparse.common.byte_sizes import format_bytes
from chipsparse.plan import Action
from chipsparse.report.generation import GenerationReport

Facts = list[tuple[str, str]]


def facts(report: GenerationReport) -> Facts:
    """Return the facts of a report, most important first, each with its label."""
    return [
        *_pipeline(report),
        *_labelled("quality", [report.quality]),
        ("steps", _steps(report)),
        *_shares(report),
        *_memory(report),
        *_labelled("warning", [report.nothing_sparse]),
        *_labelled("dense", report.fallbacks),
        *_labelled("note", report.notes),
        *_labelled("error", [report.error]),
    ]


def as_text(facts: Facts) -> str:
    """Return one line for each fact, in two columns."""
    width = max(len(label) for label, _ in facts)
    return "\n".join(f"{label:{width}}  {text}" for label, text in facts)


def as_html(facts: Facts) -> str:
    """Return a table for notebooks, without styles of its own."""
    rows = "".join(
        f'<tr><th style="text-align: left">{escape(label)}</th>'
        f'<td style="text-align: left">{escape(text)}</td></tr>'
        for label, text in facts
    )
    return f"<table><tbody>{rows}</tbody></table>"


def estimated_speedup(report: GenerationReport) -> float | None:
    """Return how much faster its calls were than if all had been computed in full.

    An estimate from these calls alone: it takes a section's fastest call in full for every call of
    it, since sections may differ in size. None where no call was computed in full, or none was
    sparse or skipped.
    """
    full: dict[int, float] = {}
    for record in report.steps:
        if record.action in (Action.DENSE, Action.REFRESH) and record.finished:
            before = full.get(record.generation, record.seconds)
            full[record.generation] = min(before, record.seconds)
    known = [record for record in report.steps if record.generation in full]
    total = sum(record.seconds for record in known)
    if total <= 0 or not any(record.used_caches for record in known):
        return None
    return sum(full[record.generation] for record in known) / total


def _pipeline(report: GenerationReport) -> Facts:
    if report.pipeline.class_name is None:
        return []
    transformers = dict.fromkeys(report.pipeline.transformers.values())
    where = [] if report.device is None else [f"on {report.device.type}"]
    dtype = [] if report.dtype is None else [f"in {report.dtype}"]
    classes = f"{report.pipeline.class_name} with {', '.join(transformers)}"
    return [("pipeline", " ".join([classes, *where, *dtype]))]


def _steps(report: GenerationReport) -> str:
    counts = report.actions()
    if not counts:
        return "none yet"
    made = {
        how: len({record.place for record in report.steps if getattr(record, how)})
        for how in ("forecast", "corrected")
    }
    how = ", ".join(f"{count} {name}" for name, count in made.items() if count)
    also = {"skip": f" ({how})"} if how else {}
    by_action = ", ".join(
        f"{count} {action}{also.get(action, '')}" for action, count in counts.most_common()
    )
    sections = len({record.generation for record in report.steps})
    within = f" in {sections} sections" if sections > 1 else ""
    return f"{counts.total()}{within}: {by_action}"


def _shares(report: GenerationReport) -> Facts:
    rows: Facts = []
    speedup = estimated_speedup(report)
    if speedup is not None:
        rows.append(
            ("gain", f"{speedup:.2f}x as fast as dense, estimated from its fastest full call")
        )
    parts = {
        "of the attention's columns": [record.attention_kept for record in report.steps],
        "of the MLPs' neurons": [record.mlp_kept for record in report.steps],
    }
    shares = []
    for name, kept in parts.items():
        known = [share for share in kept if share is not None]
        if known:
            shares.append(f"{100 * sum(known) / len(known):.3g} % {name}")
    if shares:
        rows.append(("computed", f"{' and '.join(shares)} at sparse steps"))
    return rows


def _memory(report: GenerationReport) -> Facts:
    if not report.cache_bytes:
        return []
    host = f", {format_bytes(report.host_bytes)} of it in host memory" if report.host_bytes else ""
    return [("caches", f"{format_bytes(report.cache_bytes)} at most{host}")]


def _labelled(label: str, sentences: Iterable[str | None]) -> Facts:
    return [(label, sentence) for sentence in sentences if sentence]
