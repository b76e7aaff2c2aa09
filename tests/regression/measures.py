"""What the regression tests read off clips and runs."""

import time

import torch


def centre(frame: torch.Tensor, colour: tuple[int, int, int]) -> torch.Tensor:
    """Mean row and column of the pixels ``[H, W, 3]`` with that saturated colour (0 or 1 each)."""
    bright = torch.tensor(colour, dtype=torch.bool)
    mask = (frame[..., bright] > 0.6).all(-1) & (frame[..., ~bright] < 0.45).all(-1)
    assert mask.float().mean() > 0.004, "nothing of the asked colour"
    return mask.nonzero().float().mean(0)


def processor_seconds(run):
    """What a call returns, and how long it computed, whoever else did.

    On one thread: several would also count the time in which they wait for each other, which on a
    busy machine is most of it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.process_time()
        result = run()
        return result, time.process_time() - start
    finally:
        torch.set_num_threads(threads)
