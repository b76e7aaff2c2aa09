"""The rates of the GPU that is here, measured in well under a second."""

from __future__ import annotations

import torch

from chipsparse.kernels.dense_attention import dense_attention
from chipsparse.kernels.dense_attention.measure import FastestKernel, Launch, cuda_milliseconds
from chipsparse.measure.cost_model import Rates

SIDE = 8192  # of the square matrices; tokens of the attention
HEADS, HEAD_DIM = 8, 128
COPIED = 256 << 20


def measure_rates(device: torch.device) -> Rates:
    """PyTorch's attention, linears and copies in bfloat16 on a GPU; not what our kernels reach."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    def seconds(run: Launch) -> float:
        return cuda_milliseconds(run, device) / 1e3

    with torch.inference_mode():
        left, right = random(2, SIDE, SIDE)
        linear = 2.0 * SIDE**3 / seconds(lambda: left @ right)
        query, key, value = random(3, 1, HEADS, SIDE, HEAD_DIM)
        kernels = FastestKernel()
        operations = 4.0 * SIDE**2 * HEADS * HEAD_DIM
        attention = operations / seconds(
            lambda: dense_attention(query, key, value, kernels=kernels, backend="library")
        )
        source, target = torch.zeros(2, COPIED, dtype=torch.uint8, device=device)
        memory = 2.0 * COPIED / seconds(lambda: target.copy_(source))
        host = torch.zeros(COPIED, dtype=torch.uint8).pin_memory()
        link = COPIED / seconds(lambda: target.copy_(host, non_blocking=True))
    return Rates(
        device=torch.cuda.get_device_name(device),
        measured=True,
        attention=attention,
        linear=linear,
        memory=memory,
        link=link,
    )
