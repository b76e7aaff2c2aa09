"""Calls of samples with prompts of several lengths, divided and joined again, without a model."""

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from chipsparse.pipelines.separate_lengths import joined, rows_of

SAMPLES = torch.arange(6.0).view(3, 2)
ROWS = [0, 2], [1]  # of two lengths
ORDER = torch.tensor([0, 2, 1])  # where each sample is among those of both


def test_rows_are_taken_of_what_has_one_for_each_sample():
    arguments = {
        "x": [*SAMPLES],
        "timestep": torch.tensor([1, 2, 3]),
        "shared": torch.zeros(4, 3),
        "scale": torch.tensor(7.0),
        "names": ["a", "b"],
        "return_dict": False,
    }
    taken = rows_of(arguments, ROWS[0], batch=3)
    assert taken["timestep"].tolist() == [1, 3]
    assert [sample.tolist() for sample in taken["x"]] == [[0, 1], [4, 5]]
    for name in ("shared", "scale", "names", "return_dict"):
        assert taken[name] is arguments[name]


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(lambda rows: SAMPLES[rows], id="tensor"),
        pytest.param(lambda rows: (SAMPLES[rows], None), id="tuple"),
        pytest.param(lambda rows: ([SAMPLES[row] for row in rows],), id="list of samples"),
        pytest.param(lambda rows: Transformer2DModelOutput(sample=SAMPLES[rows]), id="output"),
        pytest.param(
            lambda rows: Transformer2DModelOutput(sample=[SAMPLES[row] for row in rows]),
            id="output with a list",
        ),
    ],
)
def test_results_are_joined_in_the_order_of_the_samples(of):
    whole = joined([of(rows) for rows in ROWS], ORDER)
    expected = of([0, 1, 2])
    assert type(whole) is type(expected)
    assert repr(whole) == repr(expected)
