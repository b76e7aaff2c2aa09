"""Muon: orthogonalised momentum for matrices and the kernels of convolutions.

See Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). Updates are
scaled to the size of AdamW's, so both optimizers share one learning rate.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Weights of equal shape are orthogonalised together; kernels count as (out, all else)."""

    def __init__(
        self, params: list[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every weight; `closure` is not supported."""
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for params in by_shape.values():
                self._update(params, group)

    def _update(self, params: list[Tensor], group: dict) -> None:
        grads = [p.grad for p in params]
        buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
        torch._foreach_lerp_(buffers, grads, 1.0 - group["momentum"])
        updates = torch._foreach_lerp(grads, buffers, group["momentum"])  # Nesterov
        stacked = torch.stack(updates)
        updates = orthogonalise(stacked.flatten(2)).view(stacked.shape)
        rows, columns = stacked.flatten(2).shape[1:]
        size = 0.2 * max(rows, columns) ** 0.5
        torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(
            params, list(updates.to(params[0].dtype).unbind()), alpha=-group["lr"] * size
        )


def orthogonalise(matrices: Tensor, *, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly, of (N, rows, columns), in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315  # a Newton-Schulz iteration
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
