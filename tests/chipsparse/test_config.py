"""Configs: what is accepted, what is refused and with which words."""

import dataclasses

import numpy as np
import pytest

from chipsparse import AttentionConfig, LayerBudget, ScheduleConfig, SparsityConfig


def test_a_config_is_made_and_changed_by_paths():
    attention = AttentionConfig(density=0.25)
    actions = ("dense", "refresh", "sparse")
    schedule = ScheduleConfig(actions=actions)
    expected = SparsityConfig(attention=attention, schedule=schedule, tile=None)
    changes = {"attention.density": 0.25, "schedule.actions": list(actions), "tile": None}
    assert SparsityConfig().override({"memory.ram": "24G"}).memory.ram == 24 << 30
    assert SparsityConfig().override(changes) == expected
    assert SparsityConfig().override({**changes, "attention": attention}) == expected
    assert SparsityConfig(**dataclasses.asdict(expected)) == expected
    assert expected != SparsityConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        expected.tile = None  # type: ignore[misc]


def test_budgets_of_layers():
    listed = [{"layers": 12, "attention": 0.2}, {"layers": "0-1, 56", "mlp": "dense"}]
    config = SparsityConfig(layers=listed)
    expected = LayerBudget(layers="12", attention=0.2), LayerBudget(layers="0-1, 56", mlp="dense")
    assert config.layers == expected
    assert config.layers[1].ranges() == (range(0, 2), range(56, 57))
    assert config.layers[1].last == 56
    assert SparsityConfig().override({"layers": listed}) == config
    assert SparsityConfig(**dataclasses.asdict(config)) == config
    assert config.override({"tile": None}).layers == config.layers
    assert len({config, SparsityConfig().override({"layers": listed}), SparsityConfig()}) == 2


BY_COST = {
    "full_share": 0.3,
    "sparse_steps": 0.4,
    "sparse_at_most": 0.48,
    "skipping": {"full_share": 0.5},
}
REFUSED = [
    ("attention.density", 1.5, "between 0 and 1, got 1.5"),
    ("attention.density", float("nan"), "between 0 and 1, got nan"),
    ("attention.density", True, "expected a number or dense, got True"),
    ("attention.density", 10**400, "expected a number or dense, got 1000"),
    ("attention.delta_rule", b"means", "one of difference, means, got b'means'"),
    ("attention.delta_rule", np.array(["means"]), "means, got array(['means']"),
    ("attention", AttentionConfig, "expected a mapping with density"),
    ("mlp", 3, "mlp: expected a mapping with density, got 3"),
    ("block_size", 0, "at least 1, got 0"),
    ("block_size", 2**63, "expected a number below 2^63"),
    ("block_size", None, "expected a whole number, got None"),
    ("tile", [4, 4], "expected 3 whole numbers"),
    ("memory.vram", "24 cards", "expected an amount of memory such as 24G"),
    ("memory.ram", -1, "expected a number at least 0, got -1"),
    *((path, 1, "unknown field; allowed: ") for path in ("keep", "attention.keep", "x.y")),
    ("mlp.density.x", 1, "unknown field; allowed: "),
    # The schedule, which has one form.
    ("schedule.full_steps", [3, -1], "at least 0, got -1"),
    ("schedule.full_steps", {3, 4}, "expected a list (a whole number each), got {3, 4}"),
    ("schedule.full_steps", [0, 4, 4], "in order, each of them once, got [0, 4, 4]"),
    ("schedule.full_share", 0, "expected a number above 0 and at most 1, got 0"),
    ("schedule.sparse_steps", "first", "a number or a list (a whole number each), got 'first'"),
    ("schedule.sparse_steps", 1.5, "expected a share of at most 1, or a list of steps, got 1.5"),
    ("schedule.actions", ["dense", "all"], "[1]: expected one of dense, refresh, sparse"),
    ("schedule.actions", [], "the first step must be dense; got an empty list"),
    ("schedule.actions", ["refresh", "sparse"], "must be dense; got 'refresh' first"),
    ("schedule.actions", ["dense", "skip", "sparse"], "[2]: a sparse step reads what a refr"),
    ("schedule", {"full_steps": [0, 5], "full_share": 0.3}, "([0, 5]) and full_share (0.3) exclud"),
    ("schedule", {"full_share": 0.3, "warmup_steps": 6}, "which is 6: leave one of them out"),
    ("schedule", {"full_steps": [4], "refresh_every": 5}, ".full_steps takes the place of refresh"),
    ("schedule", {"full_share": 0.5, "sparse_steps": [3]}, ".sparse_steps ([3]) needs full_steps"),
    ("schedule", {"full_steps": [4, 6], "sparse_steps": [0, 5, 6]}, "s: [0, 6] are computed in"),
    ("schedule", {"full_steps": [4], "sparse_steps": [7, 5]}, "sparse_steps: expected steps in"),
    ("schedule", {"full_share": 0.5, "sparse_at_most": 0.48, "skipping": {}}, "sparse_steps: the"),
    ("schedule", {**BY_COST, "full_share": None, "full_steps": [4]}, "(0.48) needs full_share"),
    ("schedule", {**BY_COST, "skipping": None}, "and skipping belong together"),
    # Budgets of layers.
    ("layers", {"layers": 3}, ": expected a list (LayerBudget each), got {'layers': 3}"),
    ("layers", [3], "[0]: expected a mapping with layers, attention, mlp, got 3"),
    ("layers", [{"mlp": 0.5}], "[0].layers: expected a layer such as 12, a range such as 10-19"),
    ("layers", [{"layers": "5-3"}], "or several such as 0-1,56; got '5-3'"),
    ("layers", [{"layers": "1;2"}], "got '1;2'"),
    ("layers", [{"layers": True}], "[0].layers: expected a text, got True"),
    ("layers", [{"layers": 1, "attn": 1}], "[0].attn: unknown field; allowed: layers, attention"),
    ("layers", [{"layers": "0-3", "mlp": 0}, {"layers": "2,7", "mlp": 1}], "[1].mlp: layer 2 has"),
]


@pytest.mark.parametrize(("path", "value", "said"), REFUSED)
def test_bad_values_are_refused_by_path(path, value, said):
    with pytest.raises(ValueError, match=path.replace(".", r"\.")) as error:
        SparsityConfig().override({path: value})
    assert said in str(error.value)


# Changes of `BY_COST`, and what is then left of the fields that choose by cost.
REPLACED = {
    "full_share": ({"full_share": 0.5}, (None, None)),
    "full_steps": ({"full_steps": [1, 5]}, (None, None)),
    "least_full": ({"least_full": 3}, (None, None)),
    "sparse_steps": ({"sparse_steps": 1}, (None, None)),
    "no sparse step": ({"sparse_steps": 0}, (None, None)),
    "actions": ({"actions": ["dense", "skip"]}, (None, None)),
    "everywhere": ({"sparse_at_most": None}, (None, None)),
    "nothing": ({"full_steps": None, "actions": None}, (0.48, 0.5)),
    "another field": ({"forecast": 0.25}, (0.48, 0.5)),
    "the bound, too": ({"full_share": 0.5, "sparse_at_most": 0.3}, (0.3, 0.5)),
    "what is skipped, too": ({"full_share": 0.5, "skipping.full_share": 0.6}, (0.48, 0.6)),
}


@pytest.mark.parametrize(("changes", "left"), REPLACED.values(), ids=REPLACED)
def test_overriding_the_computed_steps_ends_the_choice_by_cost(changes, left):
    """So that what is asked for holds at every size."""
    before = SparsityConfig(schedule=ScheduleConfig(**BY_COST))
    after = before.override({f"schedule.{name}": value for name, value in changes.items()}).schedule
    share = None if after.skipping is None else after.skipping.full_share
    assert (after.sparse_at_most, share) == left
    assert after.full_share == changes.get("full_share", None if changes.get("full_steps") else 0.3)


def test_a_share_takes_the_place_of_a_list():
    listed = SparsityConfig(schedule=ScheduleConfig(full_steps=(1, 5), sparse_steps=0.2))
    after = listed.override({"schedule.full_share": 0.5}).schedule
    assert (after.full_steps, after.full_share, after.sparse_steps) == (None, 0.5, 0.2)


@pytest.mark.parametrize("values", [{5: 1}, {None: 1}, None, [1], "seed"])
def test_overriding_with_something_else_is_refused(values):
    with pytest.raises(ValueError, match=r'override: expected .* such as {"attention.density'):
        SparsityConfig().override(values)


def test_messages_stay_short_whatever_was_passed():
    bomb = [0] * 9
    for _ in range(9):
        bomb = [bomb] * 9
    of_size = [("block_size", value) for value in (bomb, "9" * 5000, -(10**5000))]
    for path, value in [("attention", bomb), *of_size]:
        with pytest.raises(ValueError, match=r"expected a") as error:
            SparsityConfig().override({path: value})
        assert len(str(error.value)) < 500


def test_scalars_of_numpy():
    attention = AttentionConfig(np.int64(1), np.str_("difference"))
    schedule = ScheduleConfig([np.uint8(7)], forecast=np.array(0.5), correct=np.bool_(False))
    config = SparsityConfig(attention=attention, schedule=schedule, block_size=np.int32(3))
    assert attention == AttentionConfig(1.0, "difference")
    assert schedule == ScheduleConfig((7,), forecast=0.5, correct=False)
    assert (type(attention.density), type(config.block_size)) == (float, int)
    with pytest.raises(ValueError, match=r"block_size: expected a whole number, got True"):
        config.override({"block_size": np.bool_(True)})


def test_the_repr_says_what_is_not_the_default():
    text = "SparsityConfig(layers=(LayerBudget(layers='3', mlp='dense'),), tile=None)"
    assert repr(eval(text)) == text
