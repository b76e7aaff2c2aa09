"""Configs: what is accepted, what is refused and with which words."""

import dataclasses

import numpy as np
import pytest

from chipsparse import (
    Actions,
    AttentionConfig,
    Branches,
    ByCost,
    LayerBudget,
    Listed,
    Periodic,
    ScheduleConfig,
    SparsityConfig,
    Spread,
)


def test_a_config_is_made_and_changed_by_paths():
    attention = AttentionConfig(density=0.25)
    actions = ("dense", "refresh", "sparse")
    schedule = ScheduleConfig(Actions(actions))
    expected = SparsityConfig(attention=attention, schedule=schedule, tile=None)
    changes = {"attention.density": 0.25, "schedule.actions": list(actions), "tile": None}
    assert SparsityConfig().override({"memory.ram": "24G"}).memory.ram == 24 << 30
    assert SparsityConfig().override(changes) == expected
    assert SparsityConfig().override({**changes, "attention": attention}) == expected
    assert SparsityConfig(**expected.words()) == expected
    assert expected != SparsityConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        expected.tile = None  # type: ignore[misc]


def test_budgets_of_layers():
    listed = [{"index": 12, "attention": 0.2}, {"index": "0-1, 56", "mlp": "dense"}]
    config = SparsityConfig(layers=listed)
    expected = LayerBudget(index="12", attention=0.2), LayerBudget(index="0-1, 56", mlp="dense")
    assert config.layers == expected
    assert config.layers[1].ranges() == (range(0, 2), range(56, 57))
    assert config.layers[1].last == 56
    assert SparsityConfig().override({"layers": listed}) == config
    assert SparsityConfig(**config.words()) == config
    assert config.override({"tile": None}).layers == config.layers
    assert len({config, SparsityConfig().override({"layers": listed}), SparsityConfig()}) == 2


MIXED = {"full": 0.3, "sparse": 0.4}
BY_COST = {"by_cost": {"mixed": MIXED, "skipping": {"full": 0.5}, "at_most": 0.48}}
REFUSED = [
    ("attention.density", 1.5, "between 0 and 1, got 1.5"),
    ("attention.density", float("nan"), "between 0 and 1, got nan"),
    ("attention.density", True, "expected a number or dense, got True"),
    ("attention.density", 10**400, "expected a number or dense, got 1000"),
    ("attention.delta_rule", b"means", "one of difference, block_means, got b'means'"),
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
    ("schedule.listed.full", [3, -1], "at least 0, got -1"),
    ("schedule.listed.full", {3, 4}, "expected a list (a whole number each), got {3, 4}"),
    ("schedule.listed.full", [0, 4, 4], "in order, each of them once, got [0, 4, 4]"),
    ("schedule.listed", {"sparse": [3]}, ".full: missing, and it has no default"),
    ("schedule.listed", {"full": [4], "sparse": "rest"}, "a list (a whole number each) or others"),
    ("schedule.listed", {"full": [4, 6], "sparse": [0, 5, 6]}, "sparse: [0, 6] are computed in"),
    ("schedule.listed", {"full": [4], "sparse": [7, 5]}, ".sparse: expected steps in order"),
    ("schedule.spread.full", 0, "expected a number above 0 and at most 1, got 0"),
    ("schedule.spread", {"full": 0.5, "sparse": 1.5}, ".sparse: expected a number between 0 and 1"),
    ("schedule.spread", {"full": 0.5, "sparse": [3]}, ".sparse: expected a number, got [3]"),
    ("schedule.spread", 0.5, ": expected a mapping with full, sparse, at_least, got 0.5"),
    ("schedule.spread", {"full": 0.5, "skips": 1}, ".skips: unknown field; allowed: full, sparse"),
    ("schedule.spread", {"sparse": 0.5}, ".full: missing, and it has no default"),
    ("schedule.actions", ["dense", "all"], "[1]: expected one of dense, refresh, sparse"),
    ("schedule.actions", [], "the first step must be dense; got an empty list"),
    ("schedule.actions", ["refresh", "sparse"], "must be dense; got 'refresh' first"),
    ("schedule.actions", ["dense", "skip", "sparse"], "[2]: a sparse step reads what a refr"),
    ("schedule.by_cost", {"at_most": 0.5}, ".mixed: missing, and it has no default"),
    ("schedule.by_cost", {**BY_COST["by_cost"], "mixed": {"full": 0.3}}, ".sparse: expected a num"),
    ("schedule.by_cost", {**BY_COST["by_cost"], "skipping": MIXED}, ".sparse: expected 0, got 0.4"),
    ("schedule.branches", [1], ": expected a mapping from branches to forms, got [1]"),
    ("schedule.branches", {"cond": {"spread": MIXED}}, ".*: missing, the form of branches withou"),
    ("schedule.branches", {"*": {"spread": {"full": 2}}}, ".*.spread.full: expected a number be"),
    ("schedule.branches", {"*": BY_COST}, ".*.by_cost: unknown form; allowed: spread, listed, pe"),
    ("schedule.branches", {"*": {}}, ".*: expected one form of spread, listed, periodic, actions"),
    ("schedule.branches", {"*": 3}, ".*: expected one form of spread, listed, periodic, actions"),
    ("schedule.branches", {"*": {"spread": MIXED, "periodic": {}}}, "there is spread already"),
    ("schedule", {"spread": MIXED, "periodic": {}}, "one form, and there is spread already"),
    ("schedule", {"skip": 1}, ".skip: unknown field; allowed: spread, listed, periodic, actions, "),
    # Budgets of layers.
    ("layers", {"index": 3}, ": expected a list (LayerBudget each), got {'index': 3}"),
    ("layers", [3], "[0]: expected a mapping with index, attention, mlp, got 3"),
    ("layers", [{"mlp": 0.5}], "[0].index: expected a layer such as 12, a range such as 10-19"),
    ("layers", [{"index": "5-3"}], "or several such as 0-1,56; got '5-3'"),
    ("layers", [{"index": "1;2"}], "got '1;2'"),
    ("layers", [{"index": True}], "[0].index: expected a text, got True"),
    ("layers", [{"index": 1, "attn": 1}], "[0].attn: unknown field; allowed: index, attention"),
    ("layers", [{"index": "0-3", "mlp": 0}, {"index": "2,7", "mlp": 1}], "[1].mlp: layer 2 has"),
]


@pytest.mark.parametrize(("path", "value", "said"), REFUSED)
def test_bad_values_are_refused_by_path(path, value, said):
    with pytest.raises(ValueError, match=path.replace(".", r"\.")) as error:
        SparsityConfig().override({path: value})
    assert said in str(error.value)


SPREAD = Spread(0.3, 0.4)
OTHERS = SparsityConfig(schedule=BY_COST)
# Paths into the form of `OTHERS` change it, and paths into other forms replace it.
OVERRIDDEN = {
    "its own field": (
        {"by_cost.skipping.full": 0.6, "by_cost.at_most": 0.3},
        ByCost(SPREAD, Spread(0.6), 0.3),
    ),
    "another form": ({"spread.full": 0.5}, Spread(0.5)),
    "two fields of another form": ({"spread.full": 0.5, "spread.sparse": 0.1}, Spread(0.5, 0.1)),
    "a whole form": ({"listed": {"full": [1, 5], "sparse": "others"}}, Listed((1, 5), "others")),
    "a form of Python": ({"periodic": Periodic(3)}, Periodic(3)),
    "actions": ({"actions": ["dense", "skip"]}, Actions(("dense", "skip"))),
    "another field": ({"forecast": 0.25}, OTHERS.schedule.form),
    "branches": (
        {"branches": {"*": {"spread": {"full": 0.5}}, "uncond": Listed((2,))}},
        Branches((("*", Spread(0.5)), ("uncond", Listed((2,))))),
    ),
}


@pytest.mark.parametrize(("changes", "form"), OVERRIDDEN.values(), ids=OVERRIDDEN)
def test_overriding_a_path_of_another_form_replaces_the_form(changes, form):
    after = OTHERS.override({f"schedule.{name}": value for name, value in changes.items()})
    assert after.schedule.form == form
    assert SparsityConfig.read(after.words()) == after
    assert eval(repr(after)) == after
    assert hash(after) == hash(SparsityConfig.read(after.words()))


def test_overriding_one_branch_keeps_the_others():
    branches = {"*": {"spread": {"full": 0.5}}, "uncond": {"listed": {"full": [2]}}}
    config = SparsityConfig(schedule={"branches": branches})
    after = config.override({"schedule.branches.uncond.spread.full": 0.2}).schedule.form
    assert after == Branches((("*", Spread(0.5)), ("uncond", Spread(0.2))))
    assert after == Branches({"uncond": Spread(0.2), "*": Spread(0.5)})
    more = config.override({"schedule.branches.call2.periodic.warmup": 4}).schedule.form
    assert dict(more.forms)["call2"] == Periodic(4)


def test_two_forms_are_one_too_many():
    with pytest.raises(
        ValueError,
        match=r"^schedule\.listed: a schedule has one form, and there is",
    ):
        OTHERS.override({"schedule.spread.full": 0.5, "schedule.listed.full": [1]})
    with pytest.raises(ValueError, match=r"^form: expected one of Spread, Listed, .*, got 0\.5"):
        ScheduleConfig(0.5)
    with pytest.raises(ValueError, match=r"^cond: expected one of Spread, .*, got ByCost\("):
        Branches({"cond": OTHERS.schedule.form, "*": Periodic()})


# Former fields of a schedule, and what is to be written in their place.
FORMER = [
    ({"full_share": 0.3}, "of full_share write spread: {full: 0.3}"),
    ({"least_full": 4}, "of least_full write spread: {at_least: 4}"),
    ({"full_steps": [1, 5]}, "of full_steps write listed: {full: [1, 5]}"),
    ({"full_steps": [1, 5], "sparse_steps": 1}, "write listed: {full: [1, 5], sparse: others}"),
    ({"sparse_steps": [3]}, "write listed: {sparse: [3]}"),
    ({"full_share": 0.2, "sparse_steps": 0.1}, "steps write spread: {full: 0.2, sparse: 0.1}"),
    ({"warmup_steps": 3}, "of warmup_steps write periodic: {warmup: 3}"),
    ({"refresh_every": 7}, "of refresh_every write periodic: {refresh_every: 7}"),
    ({"full_steps": None}, "in place of full_steps leave it out"),
    ({"first_dense_layers": 1}, "an entry of layers: [{index: 0, attention: dense, mlp: dense}]"),
    ({"first_dense_layers": 3}, "an entry of layers: [{index: 0-2, attention: dense, mlp: den"),
    ({"first_dense_layers": 0}, "an entry of layers; leave it out"),
    (
        {
            "full_share": 0.18,
            "sparse_steps": 0.26,
            "least_full": 5,
            "sparse_at_most": 0.42,
            "skipping": {"full_share": 0.32, "least_full": 8},
        },
        "write by_cost: {mixed: {full: 0.18, sparse: 0.26, at_least: 5}, at_most: 0.42, "
        "skipping: {full: 0.32, at_least: 8}}",
    ),
]


@pytest.mark.parametrize(("fields", "said"), FORMER)
def test_former_fields_of_a_schedule_say_what_they_became(fields, said):
    path = next(iter(fields))
    named = {f"schedule.{name}": value for name, value in fields.items()}
    for changes in ({"schedule": fields}, named):
        with pytest.raises(ValueError, match=rf"^schedule\.{path}: ") as error:
            SparsityConfig().override(changes)
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("attention.delta_rule", "means", "means is now block_means"),
        ("attention.precision", "auto", "auto is now model"),
        ("attention.precision", "bf16", "bf16 is now model"),
        ("memory.cache_precision", "full", "full is now model"),
        ("layers", [{"layers": 3}], "layers[0].layers: its name is now index"),
    ],
)
def test_former_words_say_what_they_became(path, value, said):
    with pytest.raises(ValueError, match=r" is now ") as error:
        SparsityConfig().override({path: value})
    assert said in str(error.value)


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
    listed = Listed([np.uint8(7)])
    schedule = ScheduleConfig(listed, forecast=np.array(0.5), correct=np.bool_(False))
    config = SparsityConfig(attention=attention, schedule=schedule, block_size=np.int32(3))
    assert attention == AttentionConfig(1.0, "difference")
    assert schedule == ScheduleConfig(Listed((7,)), forecast=0.5, correct=False)
    assert (type(attention.density), type(config.block_size)) == (float, int)
    with pytest.raises(ValueError, match=r"block_size: expected a whole number, got True"):
        config.override({"block_size": np.bool_(True)})


def test_the_repr_says_what_is_not_the_default():
    text = "SparsityConfig(layers=(LayerBudget(index='3', mlp='dense'),), tile=None)"
    assert repr(eval(text)) == text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: ScheduleConfig(full_share=0.3),
            r"in place of full_share write spread: {full: 0.3}",
        ),
        (lambda: LayerBudget(layers="0-1"), "layers: its name is now index"),
    ],
)
def test_former_names_of_arguments_say_what_they_became(make, said):
    with pytest.raises(ValueError, match=said):
        make()
