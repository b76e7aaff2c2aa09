"""Caches that live or are stored otherwise than planned, and steps that are not captured."""

from __future__ import annotations

from chipsparse.reasons.reason import Reason, note


def host_memory_refused(error: MemoryError) -> Reason:
    """Return the note for caches that were to live in host memory."""
    return note(
        "memory.host_refused",
        f"host memory for caches was refused ({error}): they stay on the device as far as they "
        "fit, and the other layers run dense",
    )


def caches_in_fp8() -> Reason:
    """Return the note for caches that ``cache_precision: auto`` stores in FP8."""
    return note(
        "memory.fp8",
        "caches are in FP8, which takes half of the bytes: in full, some would go to host memory "
        "or layers run dense (memory.cache_precision: model has it so)",
    )


def not_pinned(size: str, error: str) -> Reason:
    """Return the note for host memory that could not be pinned, so that copies are slower."""
    return note(
        "memory.not_pinned",
        f"{size} of host memory for caches could not be pinned ({error}): copies to the GPU are "
        "slower and hold up the host",
    )


def capture_dropped(what: str) -> Reason:
    """Return the note for a captured step whose model changed; ``what`` names the change."""
    return note("graphs.dropped", f"a captured sparse step was dropped: {what} changed")


def not_captured(cause: str) -> Reason:
    """Return the note for sparse steps that are not captured as a CUDA graph."""
    return note("graphs.not_captured", f"sparse steps are not captured as a CUDA graph: {cause}")
