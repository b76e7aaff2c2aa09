"""Full attention of one layer: its inputs, and how it is computed in 16 and in 8 bits.

`around_full_attention_rows` and `around_padding_rows` let a layer's attention ignore that its
layout has such rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from chipsparse.config import ConfigError
from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.kernels.dispatch import Choice
from chipsparse.kernels.fp8_dense_attention import fp8_dense_attention
from chipsparse.kernels.fp8_quantization import Fp8Attention, fp8_quantization
from chipsparse.layout import ModelLayout
from chipsparse.parallel.head_chunks import HeadChunks
from chipsparse.sparse.layers.other_text import with_padding_rows
from chipsparse.sparse.layers.state import split_full_attention_rows


@dataclass(frozen=True)
class AttentionInputs:
    """Query, key and value of a layer, and how its attention is computed."""

    query: torch.Tensor  # `[B, H, N, D]`
    key: torch.Tensor  # `[B, H, M, D]`, as is value
    value: torch.Tensor  # as key
    scale: float | None = None  # factor of the scores, None for `D ** -0.5`
    backend: str | None = None  # the kernel backend that is forced, or None
    kernels: FastestKernel | None = None  # chooses one for dense attention; None: PyTorch does
    # Brings query, key and value from other processes, some heads at a time; only their sizes are
    # known before `received`.
    chunks: HeadChunks | None = None

    def received(self) -> AttentionInputs:
        """The same with all heads here: waits for those that come in chunks."""
        if self.chunks is None:
            return self
        self.chunks.receive()
        return replace(self, chunks=None)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def of_heads(self, heads: slice) -> AttentionInputs:
        """The same with some of the heads alone, as views."""
        query, key, value = (tensor[:, heads] for tensor in self.tensors)
        return replace(self, query=query, key=key, value=value)

    def attend(self, *, in_fp8: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Full attention ``[B, H, N, D]``, and its log-sum-exp (LSE), float32 ``[B, H, N]``."""
        if in_fp8:
            output, lse, _ = fp8_dense_attention(self.rounded(), backend=self.backend)
        else:
            output, lse = dense_attention(
                *self.tensors,
                scale=self.scale,
                kernels=self.kernels,
                backend=self.backend,
            )
        return output, lse

    def rounded(self) -> Fp8Attention:
        """Query, key and value in 8 bits, rotated where the channels D are a power of two.

        Rotated, no single large channel decides about the error (benchmarks/notes/fp8.md).
        """
        head_dim = self.query.shape[-1]
        rotate = head_dim & (head_dim - 1) == 0
        return fp8_quantization(
            *self.tensors,
            rotate=rotate,
            scale=self.scale,
            backend=self.backend,
        )


def fp8_choices(inputs: AttentionInputs, *, block_size_q: int) -> dict[str, Choice]:
    """The backends of full attention in 8 bits; `ConfigError` where a GPU has only references."""
    query = inputs.query
    backend = inputs.backend
    of_blocks = query, query.dtype, block_size_q
    choices = {
        "fp8_quantization": fp8_quantization.choose(*inputs.tensors, backend=backend),
        "fp8_dense_attention": fp8_dense_attention.choose(*of_blocks, backend=backend),
    }
    if query.device.type == "cuda" and backend is None:
        for choice in choices.values():
            if choice.backend.name == "reference":
                _, reason = choice.rejected[-1]
                raise ConfigError(f"attention.precision fp8 cannot run here: {reason}")
    return choices


Attend = Callable[[AttentionInputs], torch.Tensor]  # gives `[B, H, N, D]` of the query's rows


def around_full_attention_rows(
    inputs: AttentionInputs,
    layout: ModelLayout,
    attend: Attend,
    attend_in_full: Attend,
) -> torch.Tensor:
    """Attention ``[B, H, N, D]`` where the layout's full-attention rows are computed in full.

    ``attend`` computes all other rows.
    """
    inputs = inputs.received()
    sparse_rows, full_rows = split_full_attention_rows(inputs.query, layout, 2)
    if full_rows is None:
        return attend(inputs)
    output = attend(replace(inputs, query=sparse_rows))
    first = attend_in_full(replace(inputs, query=full_rows))
    # In the order of memory that models want, so that nothing is copied twice. The few rows alone
    # may be in another, in which PyTorch would join all of them many times slower.
    first = first.transpose(1, 2).contiguous()
    return torch.cat([first, output.transpose(1, 2)], dim=1).transpose(1, 2)


def around_padding_rows(
    inputs: AttentionInputs,
    layout: ModelLayout,
    attend: Attend,
) -> torch.Tensor:
    """Attention ``[B, H, N, D]`` where ``attend`` gets the query after the layout's padding rows.

    Their results are dropped.
    """
    inputs = inputs.received()
    output = attend(replace(inputs, query=with_padding_rows(inputs.query, layout)))
    return output[:, :, layout.padding_rows :]
