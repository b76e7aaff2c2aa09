"""How far sparse attention is off, from a sample: a few query groups are also computed exactly.

The error of a layer decides what that layer does when it is reached again: the host reads it then,
a whole transformer call later, so that it hardly ever waits for the device. A layer whose error
passed the bound at one computed step is refreshed at the next one.
"""

from __future__ import annotations

import math
import zlib

import torch

from chipsparse.common.device_number import DeviceNumber
from chipsparse.config import GuardConfig
from chipsparse.kernels.checks import group_count
from chipsparse.kernels.dense_attention import dense_attention

# A walk over all groups with steps of this share of them comes near none that was there lately.
GOLDEN_SHARE = (math.sqrt(5) - 1) / 2


def sampled_error(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: list[int],
    *,
    rows: int,
    scale: float | None,
    backend: str | None,
) -> torch.Tensor:
    """Relative error of some rows of an attention output, all samples and heads together.

    Args:
        output: ``[B, H, N, D]``, as are query, key and value.
        query: as output.
        key: as output.
        value: as output.
        starts: first row of each piece that is looked at.
        rows: rows of a piece.
        scale: factor of the scores, None for ``D ** -0.5``.
        backend: forces one for the dense attention.

    Returns:
        float32 ``[]``: the L2 norm of what is wrong over the L2 norm of the exact rows.
    """

    def pieces(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[:, :, start : start + rows] for start in starts], dim=2)

    exact, _ = dense_attention(pieces(query), key, value, scale=scale, backend=backend)
    exact = exact.float()
    wrong = torch.linalg.vector_norm(pieces(output).float() - exact)
    return wrong / torch.linalg.vector_norm(exact).clamp(min=torch.finfo(torch.float32).tiny)


def checked_rows(tokens: int, *, rows: int, groups: int, turn: int, seed: int) -> list[int]:
    """First rows of the query groups that are looked at in one turn.

    Turn by turn all groups are looked at before any is again, each time some that lie far apart.
    The last group is as long as the others, and reaches into the one before it where the sequence
    ends early; so all turns have the same shapes.

    Args:
        tokens: length of the sequence.
        rows: rows of a group.
        groups: how many groups to look at.
        turn: how many times the layer was looked at before.
        seed: where to start.
    """
    total = group_count(tokens, rows)
    groups = min(groups, total)
    stride = max(1, round(GOLDEN_SHARE * total))
    while math.gcd(stride, total) > 1:
        stride += 1
    visits = range(turn * groups, (turn + 1) * groups)
    chosen = [(seed + visit * stride) % total for visit in visits]
    return [max(0, min(group * rows, tokens - rows)) for group in chosen]


class ErrorGuard:
    """Looks at the attention of all layers of one transformer, and says who needs a refresh.

    Args:
        config: bound and size of the sample.
        seed: of the config; with the branch and the layer it gives the groups to start with.
    """

    def __init__(self, config: GuardConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self.reset()

    def reset(self) -> None:
        """Forgets all errors; the groups start anew."""
        self._turns: dict[tuple[str, int], int] = {}
        self._errors: dict[tuple[str, int], DeviceNumber] = {}

    @property
    def enabled(self) -> bool:
        """Whether sparse attention is looked at."""
        return self._config.bound is not None

    def look(
        self,
        branch: str,
        layer: int,
        output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        rows: int,
        scale: float | None,
        backend: str | None,
    ) -> DeviceNumber:
        """Measures the `sampled_error` of a layer's sparse output; the host does not wait."""
        turn = self._turns.get((branch, layer), 0)
        self._turns[branch, layer] = turn + 1
        rows = min(rows, query.shape[2])
        starts = checked_rows(
            query.shape[2],
            rows=rows,
            groups=self._config.groups,
            turn=turn,
            seed=zlib.crc32(f"{self._seed} {branch} {layer}".encode()),
        )
        error = DeviceNumber(
            sampled_error(
                output, query, key, value, starts, rows=rows, scale=scale, backend=backend
            )
        )
        self._errors[branch, layer] = error
        return error

    def take(self, branch: str, layer: int) -> bool:
        """Whether the layer's error passed the bound when it was last computed; asked once.

        An error that is not a number passes it.
        """
        error = self._errors.pop((branch, layer), None)
        if error is None or self._config.bound is None:
            return False
        return not float(error) <= self._config.bound
