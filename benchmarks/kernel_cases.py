"""The registry of kernel cases: what each operation runs at a shape, its check and its baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import Case, query_key_value
from benchmarks.kernel_checks import Errors, Sample, samples
from chipsparse.experiments.timing import Timing, time_call
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dispatch import Operation

CUDA_LIBRARIES = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
DENSE = "dense"  # the baseline of attention: the fastest library kernel


@dataclass(frozen=True)
class Kernel:
    """One operation at one shape.

    Attributes:
        operation: has the backends.
        call: runs the operation with the named backend.
        check: errors of the result at a sample; raises `WrongResultError` where they are too large.
        samples: where the result is compared.
        fields: what its records say of it besides the measurement.
        baseline: name of what it replaces; `DENSE` is measured once for a case; None: nothing.
        replaces: the call of any other baseline.
        flops: useful ones, or None.
    """

    operation: Operation[..., Any]
    call: Callable[[str], Any]
    check: Callable[[Any, Any], Errors]
    samples: Sequence[Any]
    fields: dict[str, Any]
    baseline: str | None = DENSE
    replaces: Callable[[], Any] | None = None
    flops: int | None = None


class Inputs:
    """A case on a device: query, key and value, and the dense baseline, each made once."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.device, self.dtype = case, device, dtype

    @cached_property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value ``[B, H, N, D]``."""
        return query_key_value(self.case, device=self.device, dtype=self.dtype)

    @cached_property
    def lse(self) -> torch.Tensor:
        """Log-sum-exp of all columns, ``[B, H, N]`` float32."""
        return dense_attention(*self.qkv)[1]

    def of(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A sample's query rows, and the keys and values of its head, in float32."""
        query, key, value = self.qkv
        head = sample.head_of
        return query[sample.rows_of].float(), key[head].float(), value[head].float()

    def samples(self, block_size: int) -> list[Sample]:
        """The blocks of all heads where results are compared."""
        case = self.case
        return list(samples(case.batch, case.heads, case.tokens, block_size))

    def flops(self, columns: int) -> int:
        """Two products of two operations each, per head, row, computed column and channel."""
        case = self.case
        return 4 * case.batch * case.heads * case.head_dim * case.tokens * columns

    @cached_property
    def dense(self) -> tuple[str, Timing]:
        """Name and time of the fastest dense attention of the libraries here, without a mask.

        Raises:
            RuntimeError: none of them takes these tensors.
        """

        def attention() -> torch.Tensor:
            return F.scaled_dot_product_attention(*self.qkv)

        if self.device.type != "cuda":
            return "sdpa", time_call(attention, self.device)
        times: dict[str, Timing] = {}
        reasons = []
        for name, library in CUDA_LIBRARIES.items():
            with sdpa_kernel(library):
                try:
                    times[name] = time_call(attention, self.device)
                except RuntimeError as error:
                    reasons.append(f"{name}: {str(error).splitlines()[0]}")
        if not times:
            raise RuntimeError(f"no library has dense attention for this case ({reasons})")
        return min(times.items(), key=lambda item: item[1].latency_ms)


@dataclass(frozen=True)
class Settings:
    """What the command line sets.

    Attributes:
        block_size: R, query rows per block.
        density: in place of the case's own; None keeps that.
        delta_rule: of `column_sparse_attention`: none, merge or difference.
    """

    block_size: int = 128
    density: float | None = None
    delta_rule: str = "none"

    def kept(self, of_case: float, count: int) -> int:
        """How many of all columns or neurons are kept: one at least."""
        share = of_case if self.density is None else self.density
        return min(count, max(1, round(share * count)))


Maker = Callable[[Inputs, Settings], Kernel]
KERNELS: dict[str, Maker] = {}


def kernel(name: str) -> Callable[[Maker], Maker]:
    """Adds the maker of an operation's cases to `KERNELS`."""

    def add(make: Maker) -> Maker:
        KERNELS[name] = make
        return make

    return add
