"""Changes of conditions from one call to the next."""

import pytest
import torch

from chipsparse.skip.conditions import Conditions

NAME = "encoder_hidden_states"


def change_after(change, *, dtype=torch.float32):
    """What is found to have changed where a call is given what ``change`` makes of a prompt."""
    prompt = torch.arange(6, dtype=dtype).view(2, 3)
    before = Conditions({NAME: prompt}, {})
    return Conditions({NAME: change(prompt)}, {}).change(before)


@pytest.mark.parametrize(
    "change",
    [
        lambda prompt: prompt * 2,
        lambda prompt: prompt.mul_(2),
        # Equal to what the earlier tensor holds now, which is not what the earlier call read.
        lambda prompt: prompt.mul_(2).clone(),
        lambda prompt: prompt.add_(1)[:].clone(),
        lambda prompt: prompt.double(),
        lambda prompt: prompt[:1],
        lambda prompt: prompt.mT.reshape(2, 3),
        lambda _: None,
        lambda prompt: [prompt],
    ],
)
def test_changes_are_seen(change):
    assert change_after(change) == NAME


@pytest.mark.parametrize(
    "change",
    [lambda prompt: prompt, lambda prompt: prompt.clone(), lambda prompt: prompt.mT.clone().mT],
)
def test_equal_values_are_no_change(change):
    assert change_after(change) is None


def test_what_is_no_condition_is_not_looked_at():
    before = Conditions({"hidden_states": torch.zeros(3), "timestep": 1.0}, {})
    assert Conditions({"hidden_states": torch.ones(3), "timestep": 2.0}, {}).change(before) is None
