"""Columns of attention that the user wants kept whatever their score, as bits of the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bitarray import bitarray, frozenbitarray

from chipsparse.kernels.mask_packing import unpack_mask
from chipsparse.layout import ModelLayout

StaticColumns = bitarray | np.ndarray | torch.Tensor | Sequence[bool]


def static_bits(columns: Any) -> frozenbitarray:
    """One bit for each column, in order; the packed bits of the kernels, ``endian="little"``.

    Args:
        columns: a bitarray of either bit order, a bool array or tensor ``[N]``, or a list of bools.

    Raises:
        ValueError: it is something else, or has no column.
    """
    if isinstance(columns, torch.Tensor):
        columns = columns.detach().cpu().numpy()
    if isinstance(columns, np.ndarray):
        if columns.dtype != np.bool_ or columns.ndim != 1:
            raise ValueError(
                "static_columns: expected bools of shape [N], got "
                f"{columns.dtype} of shape {list(columns.shape)}"
            )
        columns = columns.tolist()
    if not isinstance(columns, bitarray):
        if not isinstance(columns, Iterable) or isinstance(columns, (str, bytes, bytearray)):
            raise ValueError(
                "static_columns: expected a bitarray, a bool array or a list of bools, got "
                f"{type(columns).__name__}"
            )
        columns = list(columns)
        other = next((item for item in columns if not isinstance(item, (bool, np.bool_))), None)
        if other is not None:
            raise ValueError(
                f"static_columns: expected True or False for each column, got {other!r}; numbers "
                "of columns become bools with mask = [False] * N; mask[number] = True"
            )
        columns = [bool(item) for item in columns]
    if not columns:
        raise ValueError("static_columns: there is no column; pass None to keep none")
    return frozenbitarray(columns, endian="little")


def check_static_bits(bits: frozenbitarray, layout: ModelLayout) -> None:
    """Raises `ValueError` where a model call has another number of columns than there are bits."""
    if len(bits) != layout.grid_tokens:
        grids = " and ".join("x".join(map(str, grid)) for grid in layout.grids)
        raise ValueError(
            f"static_columns has {len(bits)} columns, but this call has {layout.grid_tokens} video "
            f"or image tokens (frames x rows x columns: {grids}); text columns are always kept and "
            "not among them"
        )


def static_mask(
    bits: frozenbitarray, layout: ModelLayout, order: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """The columns of attention that these bits mean.

    Returns:
        bool ``[N]``; False for text columns.
    """
    packed = torch.frombuffer(bytearray(bits.tobytes()), dtype=torch.uint8)
    mask = unpack_mask(packed, len(bits), backend="reference").to(device)
    if order is not None:
        mask = mask[order]
    text = layout.text_tokens
    return F.pad(mask, (text, 0) if layout.text_first else (0, text))
