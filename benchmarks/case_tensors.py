"""What the operations of one case share: random query, key and value, and the dense baseline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import Case
from benchmarks.random_inputs import query_key_value
from chipsparse.experiments.timing import Timing, time_call
from chipsparse.kernels.dense_attention import dense_attention

CUDA_LIBRARIES = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}


@dataclass(frozen=True)
class Baseline:
    """A library's kernel and its time."""

    name: str
    timing: Timing


class CaseTensors:
    """Query, key and value of a case on a device, and what is measured on them once."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype) -> None:
        self.case, self.device, self.dtype = case, device, dtype

    @cached_property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value ``[B, H, N, D]``; made when attention first asks for them."""
        return query_key_value(self.case, device=self.device, dtype=self.dtype)

    @cached_property
    def lse(self) -> torch.Tensor:
        """Log-sum-exp of all columns, ``[B, H, N]`` float32."""
        return dense_attention(*self.qkv)[1]

    @cached_property
    def dense(self) -> Baseline:
        """The fastest dense attention of the libraries on this device, without a mask.

        Raises:
            RuntimeError: none of them takes these tensors.
        """

        def attention() -> torch.Tensor:
            return F.scaled_dot_product_attention(*self.qkv)

        if self.device.type != "cuda":
            return Baseline("sdpa", time_call(attention, self.device))
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
        fastest = min(times, key=lambda name: times[name].latency_ms)
        return Baseline(fastest, times[fastest])
