"""What a kernel benchmark runs: one operation on one case, with its check and its baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.sampled_checks import Errors
from chipsparse.kernels.dispatch import Operation


@dataclass(frozen=True)
class Settings:
    """What the command line sets for a work.

    Attributes:
        block_size: R, query rows per block.
        density: in place of the case's own; None keeps that.
        delta_rule: of `column_sparse_attention`: none, merge or difference.
        transient_bytes: bound of the column sums held at a time; one head is the least.
    """

    block_size: int = 128
    density: float | None = None
    delta_rule: str = "none"
    transient_bytes: int = 8 << 30


@dataclass(frozen=True)
class TimedCall:
    """One call of a work.

    Attributes:
        call: runs the operation with the named backend.
        compare: errors of its result at a sample; raises `WrongResultError` where they are too
            large.
        samples: where the result is compared.
        baseline: what the call replaces, where that is not dense attention.
    """

    call: Callable[[str], Any]
    compare: Callable[[Any, Any], Errors]
    samples: Sequence[Any]
    baseline: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Work:
    """One operation on one case.

    Attributes:
        operation: has the backends.
        inputs: what they accept or not, as `Operation.choose` takes it.
        parts: makes the parts, one at a time: column sums of all heads may not fit in memory, so
            that a part is some heads, and the times of all parts add up.
        baseline: ``dense`` for dense attention, the name of what the parts bring, or None.
        fields: what its records say of it besides the measurement.
        flops: useful ones, or None.
        moved_bytes: inputs read and results written once, where that bounds the time, or None.
    """

    operation: Operation[..., Any]
    inputs: tuple[Any, ...]
    parts: Callable[[], Iterator[TimedCall]]
    baseline: str | None
    fields: dict[str, Any]
    flops: int | None = None
    moved_bytes: int | None = None


def kept(settings: Settings, of_case: float, count: int) -> int:
    """How many of all columns or neurons are kept: one at least; `of_case` if no share is set."""
    share = of_case if settings.density is None else settings.density
    return min(count, max(1, round(share * count)))
