"""Facts about tensors are read once, and again where they may have changed."""

import gc

import torch

from chipsparse.pipelines.tensor_facts import TensorFacts


def test_a_tensor_is_read_once_until_it_is_written_to_and_not_held():
    read = []
    facts = TensorFacts(lambda tensor: read.append(1) or tensor.sum().item())
    first, second = torch.ones(2), torch.ones(2)
    assert [facts(first), facts(second), facts(first), facts(second)] == [2, 2, 2, 2]
    assert len(read) == 2
    first.zero_()
    assert facts(first) == 0
    assert len(read) == 3
    with torch.inference_mode():
        tensor = torch.ones(2)
        assert [facts(tensor), facts(tensor)] == [2, 2]
    assert len(read) == 4
    del first, second, tensor
    gc.collect()
    assert len(facts._known) == 0
