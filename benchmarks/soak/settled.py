"""What the soak asks of the process, so that equal calls give equal bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import diffusers
import torch

from chipsparse.kernels.dense_attention.measure import FastestKernel


@contextlib.contextmanager
def settled(device: torch.device) -> Iterator[None]:
    """One thread, the first dense kernel instead of the fastest one, and no chatter of diffusers.

    Two sessions may find another dense kernel the fastest, and sums of several threads may be
    rounded in another order.
    """
    threads, pick = torch.get_num_threads(), FastestKernel.pick
    verbosity = diffusers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_error()
    if device.type == "cpu":
        torch.set_num_threads(1)
    FastestKernel.pick = lambda _, kernels, *inputs: next(iter(kernels))  # type: ignore[method-assign]
    try:
        yield
    finally:
        FastestKernel.pick = pick  # type: ignore[method-assign]
        torch.set_num_threads(threads)
        diffusers.utils.logging.set_verbosity(verbosity)
