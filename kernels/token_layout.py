"""Activations of an MLP with the tokens of one neuron side by side, as its GPU kernels want them.

A kernel reads and writes a few neurons of many tokens. Where the tokens of a neuron are contiguous,
it moves whole cache lines; in the usual layout it would move two bytes of each. Such a tensor is a
view ``[B, N, F]`` of storage ``[B, F, N']`` with N' = N rounded up to a multiple of 8, so that each
neuron starts at a multiple of 16 bytes and kernels move eight tokens at once, also the last ones.
What pads those is read and overwritten, and nothing is ever made of it.
"""

from __future__ import annotations

import torch

ALIGNMENT = 8  # elements of two bytes in 16 bytes


def padded_rows(rows: int) -> int:
    """Tokens and what pads them."""
    return (rows + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def empty_token_contiguous(
    like: torch.Tensor,
    batch: int,
    rows: int,
    columns: int,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """An uninitialized ``[batch, rows, columns]`` whose rows (tokens) are contiguous."""
    padded = padded_rows(rows)
    storage = like.new_empty(batch, columns, padded, dtype=like.dtype if dtype is None else dtype)
    return storage.as_strided((batch, rows, columns), (columns * padded, 1, padded))


def aligned_rows(rows: int) -> int:
    """The most of so many contiguous tokens that cuBLAS multiplies on Hopper's units."""
    return rows // ALIGNMENT * ALIGNMENT


def is_token_contiguous(tensor: torch.Tensor) -> bool:
    """Return True where ``[B, N, F]`` is laid out as well as by `empty_token_contiguous`."""
    return tensor.stride(1) == 1 and tensor.stride(2) % ALIGNMENT == 0


def has_padding(tensor: torch.Tensor) -> bool:
    """Return True where kernels may move eight tokens of a ``[B, N, F]`` at once, padding included.

    A tensor whose storage ends with the last token of its last neuron lacks it. A view of fewer
    tokens of a padded tensor cannot be told apart and must not be given: kernels would overwrite up
    to seven tokens behind.
    """
    batch, rows, columns = tensor.shape
    padded = padded_rows(rows)
    if not is_token_contiguous(tensor) or tensor.data_ptr() % (ALIGNMENT * tensor.element_size()):
        return False
    if batch > 1 and tensor.stride(0) % ALIGNMENT:
        return False
    if rows == padded:
        return True
    last = tensor.storage_offset() + (batch - 1) * tensor.stride(0) + columns * padded
    fits = last * tensor.element_size() <= tensor.untyped_storage().nbytes()
    return tensor.stride(2) == padded and fits


def with_padding(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy as `empty_token_contiguous` lays it out where it lacks the padding."""
    if has_padding(tensor):
        return tensor
    return empty_token_contiguous(tensor, *tensor.shape).copy_(tensor)
