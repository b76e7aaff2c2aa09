"""Lists of full steps, and of the sparse ones between them."""

import itertools
import math

import pytest

from chipsparse.config import (
    Action,
    Actions,
    Branches,
    ByCost,
    Listed,
    Periodic,
    ScheduleConfig,
    Spread,
)
from chipsparse.skip.spread import spread
from chipsparse.skip.timetable import MANY_STEPS, Run, Schedule, resolve
from chipsparse.skip.why import may_be_sparse


def cost(steps, full):
    """What the steps of each gap count together, squared."""
    counts = [
        math.exp(4.1 * math.exp(-step / (steps - 1) / 0.2) + 1.7 * (step / (steps - 1)) ** 9)
        for step in range(steps)
    ]
    ends = zip(full, [*full[1:], steps], strict=True)
    return sum(sum(counts[step] for step in range(a + 1, b)) ** 2 for a, b in ends)


@pytest.mark.parametrize("count", range(1, 10))
def test_no_list_of_the_same_length_costs_less(count):
    lists = [(0, *rest) for rest in itertools.combinations(range(1, 10), count - 1)]
    steps = spread(10, count)
    assert steps in lists
    assert cost(10, steps) == pytest.approx(min(cost(10, other) for other in lists))


def test_lists_are_close_at_the_start_and_somewhat_closer_at_the_end():
    assert spread(50, 15) == (0, 1, 2, 3, 4, 5, 7, 9, 12, 16, 22, 29, 37, 44, 48)
    assert [spread(steps, steps) for steps in (1, 2, 12)] == [(0,), (0, 1), tuple(range(12))]


@pytest.mark.parametrize(
    ("least", "share", "steps", "count"),
    [
        *((2, share, 50, count) for share, count in ((0.001, 2), (0.26, 13), (1.0, 50))),
        *((2, 0.1, steps, count) for steps, count in ((1, 1), (2, 2), (3, 2), (40, 4))),
        *((8, 0.1, steps, count) for steps, count in ((1, 1), (8, 8), (9, 8), (80, 8), (100, 10))),
    ],
)
def test_shares_of_the_steps(least, share, steps, count):
    config = ScheduleConfig(Spread(share, at_least=least))
    assert len(Schedule(config, Run(steps)).full_steps()) == count


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (Periodic(), True),
        (Periodic(refresh_every=1), False),
        (Spread(0.3), False),
        (Spread(0.3, 0.2), True),
        (Spread(1.0, 0.2), False),
        (Listed((0, 5), (7,)), True),
        (Listed((0, 5), "others"), True),
        (Listed((0, 5)), False),
        (Actions(("dense", "skip")), False),
        (Actions(("dense", "refresh", "sparse")), True),
        (Branches({"*": Spread(0.3), "uncond": Spread(0.3, 0.2)}), True),
        (Branches({"*": Spread(0.3), "uncond": Periodic(refresh_every=1)}), False),
    ],
    ids=str,
)
def test_whether_a_form_has_sparse_steps_is_known_without_its_list(form, expected):
    assert may_be_sparse(form, 0.0) is expected
    lists = resolve(form, Run(60)).by_branch.values()
    assert any(Action.SPARSE in actions for actions in lists) is expected


BY_COST = ByCost(Spread(0.3, 0.4), Spread(0.5), at_most=0.48)


@pytest.mark.parametrize(
    ("cost", "taken"),
    [
        (0.0, BY_COST.mixed),
        (0.48, BY_COST.mixed),
        (0.49, BY_COST.skipping),
        (None, BY_COST.skipping),
    ],
)
def test_the_cost_of_a_sparse_step_chooses_one_of_two_forms(cost, taken):
    assert resolve(BY_COST, Run(20, 3, cost)) == resolve(taken, Run(20, 3, cost))
    assert may_be_sparse(BY_COST, cost) is (taken is BY_COST.mixed)


def test_each_branch_has_its_own_list_or_that_of_all_others():
    forms = {"*": Spread(0.5), "uncond": Listed((2,)), "call1": Actions(("dense", "skip"))}
    table = resolve(Branches(forms), Run(8))
    for branch, form in forms.items():
        assert table.actions(branch) == resolve(form, Run(8)).actions()
    for branch, own in (("cond", "*"), ("uncond 0,1", "uncond"), ("uncondensed", "*")):
        assert table.actions(branch) == table.actions(own)
    assert [table.action("call1", step) for step in (0, 1, 99)] == [
        Action.DENSE,
        Action.SKIP,
        Action.SKIP,
    ]


def test_an_unknown_number_of_steps():
    """A fraction is of nothing then; lists, periods and actions are what they are."""
    assert set(resolve(Spread(0.1, 0.5), Run(None)).actions()) == {Action.DENSE}
    listed = resolve(Listed((1, 3), (2, 5)), Run(None)).actions()
    assert listed[:7] == resolve(Listed((1, 3), (2, 5)), Run(7)).actions()
    assert len(listed) == MANY_STEPS
    assert resolve(Periodic(4, 3), Run(None)).actions()[-1] is not Action.DENSE  # no end is known


def test_correction_would_lose_where_a_branch_has_too_few_steps():
    few = ScheduleConfig(Branches({"*": Spread(0.5), "uncond": Spread(0.1)}))
    said = "only 5 of 50 steps are computed, too few of them for a flow shift that is so large"
    assert Schedule(few, Run(50)).why_not_corrected(6.0) == said
    assert Schedule(few, Run(50)).why_not_corrected(3.0) is None
    assert Schedule(few, Run(None)).why_not_corrected(6.0) is None
    assert Schedule(ScheduleConfig(Spread(0.1, 0.2)), Run(50)).why_not_corrected(6.0) is None
