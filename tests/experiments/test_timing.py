"""Rates that are measured on the GPU that is here."""

import pytest
import torch

from chipsparse.experiments.timing import measure_rates


@pytest.mark.gpu
def test_rates_of_the_gpu_that_is_here():
    rates = measure_rates(torch.device("cuda"))
    assert rates.measured
    assert rates.device == torch.cuda.get_device_name()
    assert 1e12 < rates.attention < rates.linear * 2 < 1e16
    assert rates.link < rates.memory < 1e14
