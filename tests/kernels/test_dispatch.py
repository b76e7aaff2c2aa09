import dataclasses

import pytest
import torch

from chipsparse.kernels.dispatch import Backend, choose, kind_of, runs_anywhere

FAST = Backend("fast", lambda x: x + 1, lambda x: None if x.is_cuda else f"no {x.device.type}")
PICKY = Backend("picky", lambda x: x + 2, lambda x: "never")
PLAIN = Backend("plain", lambda x: x + 3, runs_anywhere)
X = torch.zeros(2)


def test_takes_the_first_that_runs_and_keeps_the_reasons():
    choice = choose("op", (FAST, PICKY, PLAIN), X)
    assert choice.backend is PLAIN
    assert choice.skipped == (("fast", "no cpu"), ("picky", "never"))
    assert choice.backend.launch(X).tolist() == [3.0, 3.0]


def test_stops_at_the_first_that_runs():
    choice = choose("op", (PLAIN, PICKY), X)
    assert choice.backend is PLAIN
    assert choice.skipped == ()


def test_forced_backend_runs_even_if_a_faster_one_could():
    other = dataclasses.replace(PLAIN, name="other")
    choice = choose("op", (PLAIN, other), X, force="other")
    assert choice.backend is other
    assert choice.skipped == ()


def test_forced_backend_that_cannot_run_says_why():
    with pytest.raises(ValueError, match=r"op: backend 'fast' cannot run here: no cpu"):
        choose("op", (FAST, PLAIN), X, force="fast")


def test_unknown_backend_names_the_allowed_ones():
    with pytest.raises(ValueError, match=r"op: unknown backend 'cuda'; it has fast, plain"):
        choose("op", (FAST, PLAIN), X, force="cuda")


def test_none_that_runs_names_every_reason():
    with pytest.raises(ValueError, match=r"fast: no cpu; picky: never"):
        choose("op", (FAST, PICKY), X)


def test_choices_cannot_be_changed():
    choice = choose("op", (PLAIN,), X)
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.skipped = ()


def test_one_kind_whatever_the_values():
    tensor = torch.zeros(4, 6)
    kind = kind_of(tensor, None)
    assert kind_of(torch.ones(4, 6), None) == kind
    assert hash(kind_of(torch.ones(4, 6), None)) == hash(kind)
    others = {
        "shape": torch.zeros(4, 7),
        "strides": torch.zeros(6, 4).t(),
        "dtype": torch.zeros(4, 6, dtype=torch.float64),
        "device": torch.zeros(4, 6, device="meta"),
        "alignment": torch.zeros(25)[1:].view(4, 6),
        "none": None,
    }
    kinds = {name: kind_of(other, None) for name, other in others.items()}
    assert len({kind, *kinds.values()}) == len(others) + 1
    assert kind_of(tensor, tensor) != kind
    assert kind_of(None, tensor) != kind
