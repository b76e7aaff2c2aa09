"""Where caches live: never more than fits, nothing twice, the best parts first."""

import random
from itertools import pairwise

import pytest

from chipsparse.sparse.cache.placement import (
    NO_ROOM,
    SLOTS,
    TOO_SLOW_TO_MOVE,
    Capacity,
    PartNeed,
    place,
)
from chipsparse.sparse.cache.tensors import Kept
from tests.variants import slow, slow_unless


def needs_of(layers, *, attention=None, mlp=None, saved=(100.0, 10.0)):
    parts = (("attention", attention, saved[0]), ("mlp", mlp, saved[1]))
    return [
        PartNeed(layer, part, sizes, worth)
        for layer in range(layers)
        for part, sizes, worth in parts
        if sizes is not None
    ]


ATTENTION = {Kept.COLUMNS: 30, Kept.RESIDUAL: 70}
RESIDUALS = needs_of(4, attention={Kept.RESIDUAL: 10})


@pytest.mark.parametrize(
    ("device", "host", "options", "on_device", "slots"),
    [
        (400, 999, {}, 400, {}),  # everything stays on the device while it fits
        (200, 400, {}, 0, {"attention": ATTENTION}),
        (399, 400, {}, 100, {"attention": ATTENTION}),  # a cache moves as a whole
        (250, 0, {}, 200, {}),
        (999, 400, {"prefer_host": True}, 0, {"attention": ATTENTION}),
        (-5, -5, {}, 0, {}),
    ],
)
def test_what_does_not_fit_goes_through_two_slots(device, host, options, on_device, slots):
    placement = place(needs_of(4, attention=ATTENTION), Capacity(device, host), **options)
    assert (placement.device_bytes, placement.slots) == (on_device, slots)
    assert placement.slot_bytes == SLOTS * sum(sum(kinds.values()) for kinds in slots.values())
    assert {part for _, part in placement.host} == set(slots)
    lost = 0 if host > 0 else 4 - on_device // 100  # the early layers
    assert placement.dense == {(layer, "attention"): NO_ROOM for layer in range(lost)}


def test_layers_on_the_device_lie_between_those_on_the_host():
    placement = place(needs_of(8, attention={Kept.RESIDUAL: 10}), Capacity(60, 80))
    assert sorted(layer for layer, _ in placement.device) == [0, 2, 4, 6]
    assert sorted(layer for layer, _ in placement.host) == [1, 3, 5, 7]


def test_what_moves_both_ways_stays_first():
    needs = needs_of(4, attention={Kept.RESIDUAL: 10}, mlp={Kept.ACTIVATION: 10}, saved=(1.0, 1.0))
    placement = place(needs, Capacity(60, 80))
    assert {part for _, part in placement.device} == {"mlp"}
    assert {part for _, part in placement.host} == {"attention"}


def test_branches_share_the_slots_and_nothing_else():
    one = place(RESIDUALS, Capacity(20, 40))
    two = place(RESIDUALS, Capacity(20, 80), branches=2)
    assert one == two
    assert len(place(RESIDUALS, Capacity(20, 79), branches=2).dense) == 1
    # Slots that are there cost nothing.
    assert len(place(RESIDUALS, Capacity(0, 40)).dense) == 4
    slots = {"attention": {Kept.RESIDUAL: 10}}
    shared = place(RESIDUALS, Capacity(0, 40), open_slots=slots)
    assert not shared.dense


def test_what_is_not_worth_moving_stays_or_is_recomputed():
    mlps = [PartNeed(layer, "mlp", {Kept.ACTIVATION: 50}, 1.0, movable=False) for layer in range(4)]
    placement = place(RESIDUALS + mlps, Capacity(90, 999))
    assert {key for key in placement.device if key[1] == "mlp"} == {(3, "mlp")}
    assert {part for _, part in placement.host} <= {"attention"}
    assert placement.dense == {(layer, "mlp"): TOO_SLOW_TO_MOVE for layer in range(3)}
    forced = place(mlps, Capacity(100, 999), prefer_host=True)
    assert len(forced.host) == 4


@pytest.mark.parametrize("seed", slow_unless(range(40), range(200)))
def test_any_capacities_are_kept(seed):
    draw = random.Random(seed)
    needs = []
    for layer in range(draw.randint(1, 12)):
        attention = {
            Kept.COLUMNS: draw.randint(0, 40),
            Kept.RESIDUAL: draw.randint(1, 90),
            Kept.LSE: 3,
        }
        mlp = {Kept.ACTIVATION: draw.randint(1, 99), Kept.MEAN: 2}
        needs.append(PartNeed(layer, "attention", attention, draw.random()))
        needs.append(PartNeed(layer, "mlp", mlp, draw.random(), movable=draw.random() < 0.7))
    total = sum(need.nbytes for need in needs)
    device = draw.randint(0, total)
    host = draw.randint(0, total)
    branches = draw.randint(1, 2)
    placed = place(needs, Capacity(device, host), branches=branches)
    assert branches * placed.device_bytes + placed.slot_bytes <= device
    assert branches * placed.host_bytes <= host
    for need in needs:
        homes = [need.key in home for home in (placed.device, placed.host, placed.dense)]
        assert sum(homes) == 1
        assert need.movable or need.key not in placed.host


@pytest.mark.parametrize("movable", [True, False])
@pytest.mark.parametrize("host", [0, 200, slow(999)])
@pytest.mark.parametrize("mlp_saves", [1.0, 900.0])
def test_more_memory_never_saves_less(host, movable, mlp_saves):
    """Also where the MLPs rank first and, kept on the device, leave no slots for the attention."""
    mlps = [PartNeed(n, "mlp", {Kept.ACTIVATION: 50}, mlp_saves, movable=movable) for n in range(6)]
    needs = needs_of(6, attention=ATTENTION) + mlps
    saved = []
    for device in range(0, sum(need.nbytes for need in needs) + 7, 7):
        lost = place(needs, Capacity(device, host)).dense
        saved.append(sum(need.saved for need in needs if (need.layer, need.part) not in lost))
    assert saved[0] == 0
    assert saved[-1] == sum(need.saved for need in needs)
    assert all(later >= earlier for earlier, later in pairwise(saved))
