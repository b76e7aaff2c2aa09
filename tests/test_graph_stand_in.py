"""The stand-in for CUDA graphs: what no test of recorded steps would show of it."""

import torch

from tests.graph_stand_in import TapeRecorder


def test_a_weight_put_elsewhere_is_read_where_it_was():
    linear, hidden = torch.nn.Linear(3, 3).requires_grad_(False), torch.randn(2, 3)
    recorder = TapeRecorder()
    result, recording = recorder.capture(lambda: linear(hidden))
    linear.weight.mul_(2)  # in place
    recording.replay()
    assert torch.equal(result, linear(hidden))
    assert recorder.dangling == 0
    stale, linear.weight.data = linear(hidden), torch.zeros(3, 3)
    recording.replay()
    assert torch.equal(result, stale)
    assert recorder.dangling == 1
