"""Queries and keys of attention in int8, values in FP8 (e4m3), and what gives them back."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch

from chipsparse.kernels.calls import AttentionCall
from chipsparse.kernels.dispatch import Operation, triton_or_reference
from chipsparse.kernels.triton_support import attention_unsupported_reason, no_fp8_reason

OP = "fp8_quantization"
FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0  # finite value of e4m3
LARGEST_INT8 = 127.0
# Queries, or keys of a head, that are all smaller count as zeros.
SMALLEST = 1e-30
# The scale of int8 numbers that are all 0: kernels lose digits of what is 2 ** 23 times a scale.
NO_SCALE = 2.0**-32
# Values are stored in groups of so many tokens, each in the order of `stored_order`.
STORED_TOGETHER = 16


@dataclass(frozen=True, eq=False)
class Fp8Attention:
    """The input of attention in 8 bits. With ``q8``, ``k8`` and ``v8`` as numbers:

    - score of row i and column j, scaled: ``row_factor[i] (q8[i] · k8[j]) + row_shift[i]``;
    - value of column j, channel d: ``value_scale[d] v8[j, d] + value_mean[d]``.

    The second terms are exact: softmax does not see what all columns of a row have in common, and
    weights of one sum give a mean unchanged. So only what differs from a mean is rounded.

    Attributes:
        query: int8 ``[B, H, N, D]``, rotated where that was asked for; laid out as the query was.
        key: int8 ``[B, H, M, D]``, less its mean over tokens; contiguous, like all that follow.
        value: e4m3 ``[B, H, D, M']``, less its mean over tokens, M' = M rounded up to a multiple
            of 16. Tensor cores want the tokens of a channel side by side; within 16 tokens they
            have the `stored_order`, and past the last one stand zeros.
        row_factor: float32 ``[B, H, N]``, above 0: the scale of the row, of all keys of the head,
            and of the scores. NaN where the row, or a key of the head, holds NaN or an infinity.
        row_shift: float32 ``[B, H, N]``.
        value_scale: float32 ``[B, H, D]``.
        value_mean: float32 ``[B, H, D]``.
        columns: M.
        dtype: the dtype of query, key and value before, and of the output that they give.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    row_factor: torch.Tensor
    row_shift: torch.Tensor
    value_scale: torch.Tensor
    value_mean: torch.Tensor
    columns: int
    dtype: torch.dtype

    @property
    def factors(self) -> list[torch.Tensor]:
        """Factor and shift of rows, scale and mean of values: contiguous, as kernels read them."""
        numbers = (self.row_factor, self.row_shift, self.value_scale, self.value_mean)
        return [part.contiguous() for part in numbers]

    def heads(self, first: int, last: int) -> Fp8Attention:
        """The part of some heads; nothing is copied."""
        parts: dict[str, Any] = {
            name: part[:, first:last] for name, part in vars(self).items() if torch.is_tensor(part)
        }
        return replace(self, **parts)


@dataclass(slots=True, eq=False)
class Fp8Quantization(AttentionCall[Fp8Attention]):
    """Rounds query and key to int8, and value to e4m3: 4 bits of exponent, 3 of mantissa.

    Keys lose their mean over tokens, which changes no softmax, and go with queries in int8
    (SageAttention, Zhang et al., 2024, arXiv:2410.02367); values lose theirs, which is added to the
    output again. There is a scale for each row of the query, one for all keys of a head, so that
    single rows of them can be gathered, and one for each channel of the values.

    ``rotate`` multiplies queries and keys with a Hadamard matrix, which leaves their products as
    they are and spreads single large channels over all (FlashAttention-3, Shah et al., 2024,
    arXiv:2407.08608). What is left is nearly normal, and a fixed step serves it better than the
    three digits of e4m3.

    A scale makes the largest finite value 127 or 448, so none overflows. That of a query row is
    then corrected: ``q8`` times it has with the row the product that the row has with itself. What
    is off along the row itself is off for all columns at once, and so in the log-sum-exp.

    A query row with NaN or an infinity gets NaN as its factor, a head with such a key in all rows.
    In values both become NaN in their own place, and count in no mean or scale.

    Args (and those of `AttentionCall`):
        rotate: True rotates queries and keys; D must be a power of two.
    """

    _: KW_ONLY
    rotate: bool = False

    def check(self) -> None:
        """Raises ``ValueError`` where shapes, dtypes, devices or the rotation do not fit."""
        self.check_attention()
        head_dim = self.query.shape[-1]
        if self.rotate and head_dim & (head_dim - 1):
            raise ValueError(f"rotate needs a head size of a power of two, got {head_dim}")


def stored_order(device: torch.device) -> torch.Tensor:
    """The token of 16 that stands at each place of stored values, int64 ``[16]``.

    A thread that holds the scores of tokens ``2 t + e`` and ``8 + 2 t + e`` (t below 4, e below 2)
    finds them at the places ``4 t`` to ``4 t + 3``, where tensor cores want its four weights.
    """
    tokens = torch.arange(STORED_TOGETHER, device=device)
    return tokens.view(2, 4, 2).transpose(0, 1).flatten()


fp8_quantization = Operation(
    OP,
    Fp8Quantization,
    lambda call: (call.query, call.key, call.value),
    *triton_or_reference(
        __name__,
        OP,
        attention_unsupported_reason,
        lambda query, *_: no_fp8_reason(query.device),
    ),
)
