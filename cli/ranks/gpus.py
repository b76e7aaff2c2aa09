"""The GPUs that processes are to share a generation on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import choose_device
from chipsparse.common.byte_sizes import format_bytes


def check_gpus(gpus: int, device_name: str, *, option: str = "--gpus") -> None:
    """Raises `UserError` where there are fewer GPUs, or they cannot exchange tensors."""
    device = choose_device(device_name)
    check_exchange(device)
    if device.type != "cuda":
        return
    if device.index is not None and device_name != "auto":
        raise UserError(
            f"{option} {gpus} takes the first GPUs, and --device {device_name} is one; use "
            "--device cuda, and CUDA_VISIBLE_DEVICES to choose"
        )
    there = torch.cuda.device_count()
    if gpus > there:
        raise UserError(f"{option} {gpus} is more than the {there} GPUs that this machine has")
    kinds = {gpu_kind(index) for index in range(gpus)}
    if len(kinds) > 1:
        raise UserError(
            f"{option} {gpus} would run on GPUs of several kinds, {' and '.join(sorted(kinds))}, "
            "which wait for the slowest; choose equal ones with CUDA_VISIBLE_DEVICES"
        )


def check_exchange(device: torch.device) -> None:
    """Raises `UserError` where processes that compute on a device cannot exchange tensors."""
    if not dist.is_available():
        raise UserError("several processes need torch.distributed, which this PyTorch lacks")
    if device.type == "cuda" and not dist.is_nccl_available():
        raise UserError("several GPUs need NCCL, which this build of PyTorch lacks")


def gpu_of(local_rank: int) -> torch.device:
    """The GPU of a process that a launcher started; raises `UserError` where there is none."""
    there = torch.cuda.device_count()
    if local_rank >= there:
        raise UserError(
            f"a launcher started process {local_rank + 1} of this machine, which has {there} "
            "GPUs; start one for each, or use --device cpu"
        )
    return torch.device("cuda", local_rank)


def gpu_kind(index: int) -> str:
    """A GPU's name and memory, as far as equal ones have the same."""
    memory = torch.cuda.get_device_properties(index).total_memory
    return f"{torch.cuda.get_device_name(index)} ({format_bytes(memory >> 30 << 30)})"
