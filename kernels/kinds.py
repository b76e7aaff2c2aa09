"""Kinds of calls, which differ in the values of their tensors alone, and what is known of each."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.lru_cache(maxsize=4096)
def known_of(kind: tuple[object, ...]) -> dict[Any, Any]:
    """Facts about a kind: like Triton's own cache, about kernels and not about a caller."""
    return {}


def kind_of(*values: Any) -> tuple[object, ...]:
    """All that decides about backends: of tensors, what is the same whatever their values are."""
    kind: list[object] = []
    for value in values:
        if value is None:
            kind.append(None)
        elif isinstance(value, torch.Tensor):
            kind += (value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16)
        elif isinstance(value, (tuple, list)):
            kind.append(kind_of(*value))
        elif hasattr(value, "__dataclass_fields__"):  # a record of tensors
            kind.append(kind_of(*vars(value).values()))
        else:
            kind.append(value)
    return tuple(kind)
