"""A report in a few lines: what was done, what share of the work that was, and what ran dense."""

from __future__ import annotations

from html import escape

from chipsparse.common.byte_sizes import format_bytes
from chipsparse.config import Action
from chipsparse.report.records import GenerationRecord, mean

Facts = list[tuple[str, str]]


def facts(report: GenerationRecord) -> Facts:
    """Return the facts of a report, most important first, each with its label."""
    pipeline = report.pipeline
    rows = Facts()
    if pipeline.class_name is not None:
        words = [
            pipeline.class_name,
            "with",
            ", ".join(dict.fromkeys(pipeline.transformers.values())),
        ]
        words += [] if report.device is None else ["on", report.device.type]
        words += [] if report.dtype is None else ["in", report.dtype]
        rows.append(("pipeline", " ".join(words)))
    if report.quality is not None:
        rows.append(("quality", report.quality))
    rows.append(("steps", _steps(report)))
    speedup = estimated_speedup(report)
    if speedup is not None:
        gain = f"{speedup:.2f}x as fast as dense, estimated from its fastest full call"
        rows.append(("gain", gain))
    kept = {
        "of the attention's columns": mean(record.attention_kept for record in report.steps),
        "of the MLPs' neurons": mean(record.mlp_kept for record in report.steps),
    }
    shares = [f"{100 * share:.3g} % {name}" for name, share in kept.items() if share is not None]
    if shares:
        rows.append(("computed", f"{' and '.join(shares)} at sparse steps"))
    if report.cache_bytes:
        host = f", {format_bytes(report.host_bytes)} of it in host memory"
        at_most = f"{format_bytes(report.cache_bytes)} at most"
        rows.append(("caches", at_most + (host if report.host_bytes else "")))
    if report.nothing_sparse is not None:
        rows.append(("warning", report.nothing_sparse))
    rows += [("dense", sentence) for sentence in report.fallbacks]
    rows += [("note", sentence) for sentence in report.notes]
    if report.error is not None:
        rows.append(("error", report.error))
    return rows


def _steps(report: GenerationRecord) -> str:
    counts = report.actions()
    if not counts:
        return "none yet"
    places = {
        name: {record.place for record in report.steps if getattr(record, name)}
        for name in ("forecast", "corrected")
    }
    skipped = ", ".join(f"{len(steps)} {name}" for name, steps in places.items() if steps)
    texts = [f"{count} {action}" for action, count in counts.most_common()]
    if skipped:
        texts = [f"{text} ({skipped})" if text.endswith("skip") else text for text in texts]
    sections = len({record.generation for record in report.steps})
    within = f" in {sections} sections" if sections > 1 else ""
    return f"{counts.total()}{within}: {', '.join(texts)}"


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


def estimated_speedup(report: GenerationRecord) -> float | None:
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
