"""Stock attention by another kernel of PyTorch's: what differs then means nothing.

Kernels round differently, and over many steps a generation goes another, equally right way. How far
is the floor under every comparison of outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.MATH: "math",
}


@contextmanager
def other_attention(transformers: Sequence[torch.nn.Module]) -> Iterator[Callable[[], str | None]]:
    """While it lasts, every `scaled_dot_product_attention` in these models takes another kernel.

    Not the one that PyTorch takes for those tensors, but the next that can run: cuDNN's, flash or
    memory-efficient attention, and the plain formula (math) where there is no other, as on a CPU.
    Yields a function that tells the kernels, see `_Swaps.sentence`.
    """
    swaps = _Swaps()
    handles = []
    for module in transformers:
        handles.append(module.register_forward_pre_hook(swaps.begin))
        handles.append(module.register_forward_hook(swaps.end, always_call=True))
    try:
        yield swaps.sentence
    finally:
        for handle in handles:
            handle.remove()
        swaps.leave()


class _Swaps(TorchFunctionMode):
    """On only inside the models: text encoders and VAEs compute what they always do."""

    def __init__(self) -> None:
        super().__init__()
        self._made: Counter[tuple[SDPBackend, SDPBackend]] = Counter()
        self._inside = False

    def begin(self, *_: Any) -> None:
        self.__enter__()
        self._inside = True

    def end(self, *_: Any) -> None:
        self._inside = False
        self.__exit__(None, None, None)

    def leave(self) -> None:
        """Ends what Ctrl-C broke off: no hook runs behind that."""
        if self._inside:
            self.end()

    def sentence(self) -> str | None:
        """The pair of most calls, in words; None where the models call another library."""
        if not self._made:
            return None
        (stock, other), _ = self._made.most_common(1)[0]
        return f"{NAMES[other]} attention instead of {NAMES.get(stock, stock.name)}"

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> object:
        options = options or {}
        if function is not scaled_dot_product_attention:
            return function(*arguments, **options)
        stock = SDPBackend(torch._fused_sdp_choice(*arguments, **options))
        other = next((each for each in _usable(*arguments, **options) if each != stock), None)
        if other is None:
            return function(*arguments, **options)
        self._made[stock, other] += 1
        with sdpa_kernel(other):
            return function(*arguments, **options)


def _usable(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Iterator[SDPBackend]:
    """Kernels that take these tensors, by preference; arguments as of the function."""
    if query.device.type == "cuda":
        cuda = torch.backends.cuda
        facts = cuda.SDPAParams(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        for kernel, can_run in (
            (SDPBackend.FLASH_ATTENTION, cuda.can_use_flash_attention),
            (SDPBackend.CUDNN_ATTENTION, cuda.can_use_cudnn_attention),
            (SDPBackend.EFFICIENT_ATTENTION, cuda.can_use_efficient_attention),
        ):
            if can_run(facts):
                yield kernel
    yield SDPBackend.MATH
