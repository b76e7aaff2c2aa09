"""Wrappers around the ``step`` of real schedulers, whose attributes and copies are stock."""

import abc
import copy
import inspect
import pickle

import diffusers
import pytest
import torch

from chipsparse.skip.patched_step import wrap_step
from tests.chipsparse.skip.test_correction import BASE, SCHEDULERS, START

# Of diffusers' older schedulers, which mix tensors and NumPy arrays.
pytestmark = pytest.mark.filterwarnings("ignore:.*__array:DeprecationWarning")


@pytest.fixture(params=SCHEDULERS.values(), ids=SCHEDULERS)
def scheduler(request):
    scheduler = request.param()
    scheduler.set_timesteps(8)
    return scheduler


def counting(calls, name=""):
    def wrap(step):
        return lambda *args, **kwargs: (calls.append(name), step(*args, **kwargs))[1]

    return wrap


def step_once(scheduler):
    index = scheduler.step_index or 0
    return scheduler.step(BASE, scheduler.timesteps[index], START, return_dict=False)[0]


COPIES = {
    "shallow": copy.copy,
    "deep": copy.deepcopy,
    "pickled": lambda scheduler: pickle.loads(pickle.dumps(scheduler)),
    "pickled, old": lambda scheduler: pickle.loads(pickle.dumps(scheduler, 0)),
    "made anew": lambda scheduler: type(scheduler).from_config(scheduler.config),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_of_a_scheduler_with_a_wrapped_step_are_stock(scheduler, copied):
    stock = copy.deepcopy(scheduler)
    calls = []
    undo = wrap_step(scheduler, counting(calls))
    other = copied(scheduler)
    if len(other.timesteps) != 8:
        other.set_timesteps(8)
    undo()
    assert type(other) is type(scheduler) is type(stock)
    assert vars(scheduler).keys() == vars(stock).keys() <= vars(other).keys()
    assert "step" not in vars(other)
    assert torch.equal(step_once(other), step_once(stock))
    assert (scheduler.step_index, other.step_index, calls) == (None, 1, [])


@pytest.mark.parametrize("own", ["none", "before", "after", "around"])
def test_a_wrapped_step_is_around_the_users_own(scheduler, own):
    """The user's own step was there before, came later, or is set around the wrapped one."""
    stock = copy.deepcopy(scheduler)
    calls = []
    mine = counting(calls, "own")(scheduler.step)
    if own == "before":
        scheduler.step = mine
    undo = wrap_step(scheduler, counting(calls, "wrapped"))
    wrapped = mine if own == "before" else stock.step
    assert inspect.signature(scheduler.step) == inspect.signature(wrapped)
    if own == "after":
        scheduler.step = mine
    elif own == "around":
        scheduler.step = counting(calls, "own")(scheduler.step)
    assert torch.equal(step_once(scheduler), step_once(stock))
    expected = [] if own == "none" else ["own"]
    assert calls == ["wrapped", *expected]
    assert isinstance(scheduler, type(stock))
    assert type(scheduler).__name__ == type(stock).__name__
    undo()
    assert torch.equal(step_once(scheduler), step_once(stock))
    assert calls == ["wrapped", *expected, *expected]
    if own != "none":
        assert own == "around" or scheduler.step is mine
        del scheduler.step
    assert vars(scheduler).keys() == vars(stock).keys()


@pytest.mark.parametrize("first", [0, 1])
def test_wrappings_around_each_other_are_taken_back_in_any_order(scheduler, first):
    calls = []
    kind = type(scheduler)
    undo = [wrap_step(scheduler, counting(calls, name)) for name in "ab"]
    step_once(scheduler)
    assert calls == ["b", "a"]
    assert type(copy.deepcopy(scheduler)) is kind
    undo[first]()
    step_once(scheduler)
    assert calls == ["b", "a", "ab"[1 - first]]
    undo[1 - first]()
    assert type(scheduler) is kind


def test_a_wrapper_that_is_taken_off_twice_takes_no_other_with_it(scheduler):
    calls = []
    kind = type(scheduler)
    undo = wrap_step(scheduler, counting(calls, "first"))
    undo()
    second = wrap_step(scheduler, counting(calls, "second"))
    undo()
    step_once(scheduler)
    assert calls == ["second"]
    second()
    assert type(scheduler) is kind


def test_a_wrapper_may_be_taken_off_within_the_step(scheduler):
    """Wrappers inside of it are called all the same."""
    calls = []
    kind = type(scheduler)
    inner = wrap_step(scheduler, counting(calls, "inner"))

    def leaving(step):
        def call(*args, **kwargs):
            outer()
            return step(*args, **kwargs)

        return call

    outer = wrap_step(scheduler, leaving)
    step_once(scheduler)
    step_once(scheduler)
    assert calls == ["inner", "inner"]
    inner()
    assert type(scheduler) is kind


def test_each_wrapper_is_told_of_deep_copies_and_of_none_that_its_step_makes(scheduler):
    told = []
    undo = [
        wrap_step(scheduler, counting([]), lambda twin, name=name: told.append((name, twin)))
        for name in "abc"
    ]
    undo[1]()
    twin = copy.deepcopy(scheduler)
    assert [name for name, _ in told] == ["a", "c"]
    assert all(each is twin for _, each in told)
    copy.copy(scheduler)
    own = scheduler.step
    scheduler.step = lambda *args, **kwargs: (copy.deepcopy(scheduler), own(*args, **kwargs))[1]
    step_once(scheduler)
    assert len(told) == 2


class Abstract(abc.ABC):
    @abc.abstractmethod
    def step(self, value): ...


class Concrete(Abstract):
    def step(self, value):
        return value + 1


def test_a_scheduler_of_an_abstract_class_keeps_its_class():
    scheduler = Concrete()
    undo = wrap_step(scheduler, lambda step: lambda value: 10 * step(value))
    assert isinstance(scheduler, Abstract)
    assert type(scheduler) == Concrete  # noqa: E721 - as libraries compare it
    assert type(type(scheduler)()) is Concrete
    assert scheduler.step(1) == 20
    undo()
    assert type(scheduler) is Concrete
    assert scheduler.step(1) == 2


def test_a_step_that_was_not_set_cannot_be_deleted(scheduler):
    undo = wrap_step(scheduler, counting([]))
    with pytest.raises(AttributeError, match="step"):
        del scheduler.step
    undo()


def test_a_step_that_raises_is_wrapped_the_next_time():
    calls = []
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    undo = wrap_step(scheduler, counting(calls, "wrapped"))
    with pytest.raises(TypeError):
        scheduler.step()
    scheduler.set_timesteps(8)
    step_once(scheduler)
    assert calls == ["wrapped", "wrapped"]
    undo()
