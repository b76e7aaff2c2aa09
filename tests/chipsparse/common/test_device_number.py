"""Numbers that the host reads later than the device computes them."""

import torch

from chipsparse.common.device_number import DeviceNumber


def test_a_number_is_read_once_and_stays():
    source = torch.tensor([0.5])
    found = DeviceNumber(source)
    assert float(found) == 0.5
    source.fill_(2)
    assert float(found) == 0.5
