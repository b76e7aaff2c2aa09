from dataclasses import KW_ONLY, dataclass, make_dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from chipsparse.kernels.dispatch import Backend, Call, Operation, imported
from chipsparse.kernels.kinds import kind_of

FAST = Backend("fast", lambda: lambda call: call.x + 1, lambda x: f"no {x.device.type}")
PICKY = Backend("picky", lambda: lambda call: call.x + 2, lambda x: "never")
SLOW = Backend("slow", lambda: lambda call: call.x + 3, not_auto_reason=lambda x: "slow")
PLAIN = Backend("plain", lambda: lambda call: call.x + call.step)
X = torch.zeros(2)


@dataclass(slots=True, eq=False)
class Add(Call[torch.Tensor]):
    """Adds a little."""

    x: torch.Tensor
    _: KW_ONLY
    step: int = 4

    def check(self):
        if self.step < 0:
            raise ValueError(f"step must not be negative, got {self.step}")


def add(*backends):
    return Operation("add", Add, lambda call: (call.x,), *backends)


def test_takes_the_first_that_runs_and_keeps_the_reasons_or_what_is_forced():
    choice = add(FAST, PICKY, SLOW, PLAIN).choose(X)
    assert choice.backend is PLAIN
    assert choice.rejected == (("fast", "no cpu"), ("picky", "never"), ("slow", "slow"))
    assert add(FAST, PICKY, SLOW, PLAIN)(X, step=5).tolist() == [5.0, 5.0]
    forced = add(PLAIN, SLOW).choose(X, backend="slow")
    assert (forced.backend, forced.rejected) == (SLOW, ())
    assert add(PLAIN, SLOW)(X, backend="slow").tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("operation", "options", "said"),
    [
        (add(FAST, PLAIN), {"backend": "fast"}, "add: backend 'fast' cannot run here: no cpu"),
        (add(FAST, PLAIN), {"backend": "cuda"}, "add: unknown backend 'cuda'; it has fast, plain"),
        (add(FAST, PICKY), {}, "fast: no cpu; picky: never"),
    ],
)
def test_what_cannot_run_says_why(operation, options, said):
    with pytest.raises(ValueError, match=said):
        operation(X, **options)


def test_calls_of_one_kind_are_checked_and_their_backend_chosen_once():
    asked = []
    operation = add(Backend("only", lambda: PLAIN.launch, asked.append))
    for x in (X, X + 1, torch.zeros(3)):
        assert operation(x).tolist() == (x + 4).tolist()
    assert len(asked) == 2
    with pytest.raises(ValueError, match="step must not be negative, got -1"):
        operation(X, step=-1)
    assert torch.vmap(operation)(torch.zeros(1, 2)).tolist() == [[4.0, 4.0]]


def test_calls_of_two_operations_are_checked_each_by_its_own_record():
    """Also where their arguments and backends are the same."""

    class AddTwice(Add):
        def check(self):
            raise ValueError("never fits")

    assert add(PLAIN)(X).tolist() == [4.0, 4.0]
    with pytest.raises(ValueError, match="add twice: never fits"):
        Operation("add twice", AddTwice, lambda call: (call.x,), PLAIN)(X)
    assert Add(X).known() is Add(X + 1).known()
    assert Add(X).known() is not AddTwice(X).known()


def test_nothing_is_kept_of_tensors_that_stand_for_others():
    """What is true of tensors without memory may not be of those of the same sizes."""
    asked = []
    operation = add(Backend("only", lambda: PLAIN.launch, asked.append))
    with FakeTensorMode():
        for _ in range(2):
            assert operation(torch.zeros(7)).shape == (7,)
    assert len(asked) == 2
    assert operation(torch.zeros(7)).tolist() == [4.0] * 7
    assert len(asked) == 3


def test_a_backend_is_imported_where_it_first_runs_and_once():
    loads = []
    backend = Backend("lazy", lambda: loads.append("loaded") or torch.neg)
    operation = add(PLAIN, backend)
    operation(X)
    assert loads == []
    assert backend.launch is torch.neg
    assert backend.launch is torch.neg
    assert loads == ["loaded"]
    assert imported("torch", "neg")() is torch.neg


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
        "tuple": (tensor, 5),
        "record": make_dataclass("Record", ["x", "size"])(tensor, 6),
    }
    kinds = {name: kind_of(other, None) for name, other in others.items()}
    assert len({kind, *kinds.values()}) == len(others) + 1
    assert kind_of(tensor, tensor) != kind
    assert kind_of(None, tensor) != kind
