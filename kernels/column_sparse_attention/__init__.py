"""Attention of each query block over its own list of key columns, joined with a residual cache."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

import torch

from chipsparse.kernels.calls import AttentionCall
from chipsparse.kernels.checks import (
    block_count,
    check_block_size,
    check_dtype,
    check_floating,
    check_shape,
)
from chipsparse.kernels.dispatch import Operation, gluon, triton_or_reference
from chipsparse.kernels.fp8_quantization import FP8
from chipsparse.kernels.triton_support import attention_unsupported_reason, block_rows_reason

OP = "column_sparse_attention"


@dataclass(slots=True, eq=False)
class ColumnSparseAttention(AttentionCall[torch.Tensor]):
    """Softmax attention over the kept columns, with tile packing, and the residual added to it.

    Every block of query rows packs the key and value rows that it keeps into dense tiles (Chipmunk,
    "Deep Dive on GPU Kernel Optimizations and Systems", part III). Any lists of columns work, so a
    static pattern is only another set of indices.

    With A the attention over the kept columns alone, the output is ``A + residual``, or A where no
    residual is given. A refresh, whose full output is o, records ``residual = o - A``.

    NaN in a query or mean, or in a key or value that a list names, comes out as NaN in the rows
    that it enters, an infinite score as NaN too; no other row of key and value is read.

    With means, every query also attends to all rows of ``mean_key`` and ``mean_value``: columns
    that count ``mean_weight`` times, as log ``mean_weight`` is added to their scores. They are part
    of A, also of a block that keeps no column.

    Args (and those of `AttentionCall`):
        indices: int32 ``[B, H, G, K]``, columns below M; a list must not repeat a column. Entries
            past a block's count must be valid columns too (0 will do); they are ignored. No values
            are looked at, which would make the host wait for the device.
        counts: int32 ``[B, H, G]``, how many entries of each list count, at most K. A block with
            none has A = 0, unless there are means.
        block_size_q: R, query rows per block; the last of the G = ceil(N / R) blocks may be ragged.
        residual: ``[B, H, N, D]`` floating point, or e4m3 of finite numbers; None for none.
        residual_scale: float32 ``[B, H, N]``, by which the rows of a residual in e4m3 are
            multiplied; given with such a residual and no other.
        mean_key: ``[B, H, any, D]``, dtype and device of query; None for no means.
        mean_value: the shape and dtype of mean_key; given with it.
        mean_weight: above 0.
        shares_device: whether other kernels run beside, which exchange tensors with other GPUs.
            Then no program of this one waits for the multiprocessors that those occupy, with work
            of its own that others could do.

    Returns:
        The output ``[B, H, N, D]`` in query's dtype.
    """

    indices: torch.Tensor
    counts: torch.Tensor
    _: KW_ONLY
    block_size_q: int = 128
    residual: torch.Tensor | None = None
    residual_scale: torch.Tensor | None = None
    mean_key: torch.Tensor | None = None
    mean_value: torch.Tensor | None = None
    mean_weight: float = 1.0
    shares_device: bool = False

    def of_heads(self, heads: slice) -> ColumnSparseAttention:
        """The same of some heads, which are the second dimension of every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {
            name: value[:, heads]
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **tensors)

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes or devices do not fit."""
        self.check_attention()
        check_block_size(block_size_q=self.block_size_q)
        indices = self.indices
        lists = (*self.query.shape[:2], block_count(self.query.shape[2], self.block_size_q))
        check_dtype("indices", indices, torch.int32)
        if indices.dim() != 4:
            raise ValueError(f"indices must be [B, H, G, K], got {list(indices.shape)}")
        check_shape("indices", indices, (*lists, indices.shape[3]))
        check_shape("counts", self.counts, lists, torch.int32)
        self._check_residual()
        self._check_means()

    def _check_means(self) -> None:
        if (self.mean_key is None) != (self.mean_value is None):
            missing = "mean_key" if self.mean_key is None else "mean_value"
            raise ValueError(f"mean_key and mean_value belong together; {missing} is None")
        if not 0 < self.mean_weight < math.inf:
            raise ValueError(f"mean_weight must be above 0 and finite, got {self.mean_weight}")
        if self.mean_key is not None and self.mean_value is not None:
            self.check_columns(mean_key=self.mean_key, mean_value=self.mean_value)

    def _check_residual(self) -> None:
        residual = self.residual
        scale = self.residual_scale
        if (scale is not None) != (residual is not None and residual.dtype == FP8):
            dtype = None if residual is None else residual.dtype
            raise ValueError(
                f"residual_scale belongs to a residual in {FP8}; got one of "
                f"{dtype} {'without' if scale is None else 'with'} it",
            )
        if residual is None:
            return
        check_shape("residual", residual, self.query.shape)
        if scale is None:
            check_floating(residual=residual)
        else:
            check_shape("residual_scale", scale, self.query.shape[:3], torch.float32)


column_sparse_attention = Operation(
    OP,
    ColumnSparseAttention,
    lambda call: (call.query, call.key, call.value, call.block_size_q),
    gluon(f"{__name__}.gluon_sm90", OP, attention_unsupported_reason, block_rows_reason),
    *triton_or_reference(__name__, OP, attention_unsupported_reason),
)
