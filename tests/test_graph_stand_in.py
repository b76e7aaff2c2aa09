"""The stand-in for CUDA graphs: launches compute what the recorded call did, where it did."""

import pytest
import torch
import torch.nn.functional as F

from chipsparse.kernels.dispatch import Backend
from tests.graph_stand_in import LAUNCH, TapeRecorder


@pytest.fixture
def recorder():
    return TapeRecorder()


def model(hidden, weight, cache):
    """Views of views, a copy that is a view elsewhere, writes in place, and memory of its own."""
    rows = hidden.transpose(0, 1).reshape(-1, 3)
    scores = F.scaled_dot_product_attention(*(rows[None, None],) * 3)[0, 0]
    result = torch.empty_like(rows)
    result[::2] = F.linear(scores, weight)[::2]
    result[1::2] = torch.tensor([1.0, 2.0, 3.0])
    cache.add_(result.sum())
    return {"rows": result.t(), "cache": cache + 1}


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=generator) for size in ((3, 4), (3, 3), (2,))]


@pytest.mark.parametrize("fails", [False, True])
def test_recording_leaves_outside_memory_as_it_was(fails, recorder):
    hidden, weight, cache = inputs()

    def call():
        model(hidden, weight, cache)
        hidden[0].fill_(7)
        if fails:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if fails else recorder.on(hidden.device):
        recorder.capture(call)
    assert all(map(torch.equal, (hidden, weight, cache), inputs()))
    assert vars(Backend)["launch"] is LAUNCH


def test_a_weight_put_elsewhere_is_read_where_it_was(recorder):
    linear, hidden = torch.nn.Linear(3, 3).requires_grad_(False), torch.randn(2, 3)
    result, recording = recorder.capture(lambda: linear(hidden))
    linear.weight.mul_(2)  # in place
    recording.replay()
    assert torch.equal(result, linear(hidden))
    assert recorder.dangling == 0
    stale, linear.weight.data = linear(hidden), torch.zeros(3, 3)
    recording.replay()
    assert torch.equal(result, stale)
    assert recorder.dangling == 1


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.nonzero, bool])
def test_to_read_a_value_on_the_host_cannot_be_recorded(read, recorder):
    value = torch.ones(1)
    with pytest.raises(RuntimeError, match="waits for the device"):
        recorder.capture(lambda: read(value + 1))
