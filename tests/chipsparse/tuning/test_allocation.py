"""Allocation against brute force on tiny problems."""

import itertools
import random

import pytest

from chipsparse.config import SparsityConfig
from chipsparse.tuning.allocation import (
    Option,
    cautious_walk,
    global_budgets,
    hull,
    walk,
    with_budgets,
)

SHARES = (None, 0.1, 0.3, 0.5)


def random_sites(seed, count):
    numbers = random.Random(seed)
    return {
        ("attention" if i % 2 else "mlp", i // 2): [
            Option(share, numbers.uniform(1, 10), numbers.uniform(0, 4) ** 3) for share in SHARES
        ]
        for i in range(count)
    }


def all_totals(sites, seconds, error):
    for chosen in itertools.product(*sites.values()):
        yield (
            seconds + sum(option.seconds for option in chosen),
            error + sum(option.error for option in chosen),
        )


@pytest.mark.parametrize("seed", range(8))
def test_a_walk_visits_every_optimum_of_the_lagrangian(seed):
    sites = random_sites(seed, 5)
    made = walk(sites, seconds=7.0, error=2.0)
    points = list(zip(made.seconds, made.errors, strict=True))
    every = list(all_totals(sites, 7.0, 2.0))
    for price in (0.0, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 1e3):
        best = min(seconds + price * error for seconds, error in every)
        assert min(s + price * e for s, e in points) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_beats_a_point_of_the_walk_in_both(seed):
    sites = random_sites(seed, 5)
    made = walk(sites)
    assert list(made.seconds) == sorted(made.seconds)
    assert list(made.errors) == sorted(made.errors, reverse=True)
    for seconds, error in zip(made.seconds, made.errors, strict=True):
        assert not [
            point
            for point in all_totals(sites, 0.0, 0.0)
            if point[0] < seconds - 1e-9 and point[1] < error - 1e-9
        ]


@pytest.mark.parametrize("trust", [1.0, 0.5, 0.0])
def test_the_budgets_of_a_walk_cost_what_it_says(trust):
    sites = random_sites(3, 6)
    made = walk(sites, seconds=1.0, error=0.5, trust=trust)
    for number in range(len(made.seconds)):
        chosen = made.budgets(number)
        taken = [o for site, options in sites.items() for o in options if o.budget == chosen[site]]
        assert len(taken) == len(sites)
        assert made.seconds[number] == pytest.approx(1.0 + sum(o.seconds for o in taken))
        assert made.errors[number] == pytest.approx(0.5 + sum(o.error for o in taken))


def layers(errors):
    """Attention layers that are alike but for their errors, which fall as budgets rise."""
    return {
        ("attention", layer): [
            *(Option(n / 50, n / 50, error * (1 - n / 50) ** 4) for n in range(1, 40)),
            Option(None, 1.0, 0.0),
        ]
        for layer, error in enumerate(errors)
    }


def budgets_of(made, spent):
    """Those of the last place of a walk that takes no more than this."""
    return made.budgets(max(n for n, s in enumerate(made.seconds) if s <= spent + 1e-9))


def test_the_less_is_believed_the_nearer_the_layers_are_to_each_other():
    sites = layers([1.0, 4.0, 16.0, 4096.0])
    spread = {}
    for trust in (1.0, 0.5, 0.0):
        chosen = budgets_of(walk(sites, trust=trust), spent=1.2)
        shares = [1.0 if share is None else share for share in chosen.values()]
        assert shares == sorted(shares)  # what is most wrong has most
        spread[trust] = shares[-1] / shares[0]
    assert spread[1.0] > spread[0.5] >= spread[0.0]
    half, cautious = walk(sites, trust=0.5), cautious_walk(sites)
    assert (half.seconds, half.errors) == (cautious.seconds, cautious.errors)


def test_without_trust_all_layers_are_the_same():
    """But for the last exchange, which not all of them could have."""
    sites = layers([1.0, 4.0, 16.0, 4096.0])
    made = walk(sites, trust=0.0)
    for number in range(0, len(made.seconds), len(sites)):
        assert len(set(made.budgets(number).values())) == 1


def test_a_layer_without_errors_needs_nothing():
    sites = layers([0.0, 1.0])
    assert {o.budget for o in hull(sites["attention", 0])} == {0.02}
    made = cautious_walk(sites)
    assert {made.budgets(number)["attention", 0] for number in range(len(made.seconds))} == {0.02}


def test_a_hull_leaves_out_what_a_mixture_beats():
    points = [(1, 10), (2, 9), (3, 2), (4, 3), (5, 1), (5, 0.5), (6, 0.5)]
    kept = hull(Option(None, s, e) for s, e in points)
    assert [(o.seconds, o.error) for o in kept] == [(1, 10), (3, 2), (5, 0.5)]


def test_global_budgets_are_the_same_in_every_layer():
    sites = random_sites(5, 6)
    made = global_budgets(sites, seconds=1.0)
    assert len(made.seconds) == len(SHARES) ** 2
    for number in range(len(made.seconds)):
        chosen = made.budgets(number)
        assert len({chosen[site] for site in sites if site[0] == "mlp"}) == 1
        assert len({chosen[site] for site in sites if site[0] == "attention"}) == 1
        total = sum(o.seconds for s, each in sites.items() for o in each if o.budget == chosen[s])
        assert made.seconds[number] == pytest.approx(1.0 + total)


def test_nothing_to_allocate():
    for allocate in (walk, cautious_walk, global_budgets):
        made = allocate({}, seconds=3.0, error=0.25)
        assert list(made.seconds) == [3.0]
        assert list(made.errors) == [0.25]
        assert made.budgets(0) == {}


def test_budgets_become_a_config():
    budgets = {("attention", i): share for i, share in enumerate([0.1, 0.1, 0.3, None, 0.3, 0.1])}
    budgets |= {("mlp", i): None for i in range(6)}
    config = with_budgets(SparsityConfig(), budgets)
    assert config.attention.keep_fraction == 0.1
    assert not config.mlp.enabled
    assert [(each.layers, each.attention, each.mlp) for each in config.layers] == [
        ("2,4", 0.3, None),
        ("3", "dense", None),
    ]
