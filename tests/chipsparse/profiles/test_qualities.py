"""What each class computes in each quality, and that each quality is faster than the one before."""

import functools
import itertools
from collections import Counter
from dataclasses import replace

import diffusers
import pytest
import torch

from chipsparse.cli.model.description import default_arguments
from chipsparse.config import Action, ByCost, LayerBudget, SparsityConfig, Spread
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.pipelines.registry import FAMILIES
from chipsparse.profiles.profile import QUALITIES, find_profile, profile_classes
from chipsparse.report.nothing_sparse import why_nothing
from chipsparse.skip.timetable import Run, resolve
from chipsparse.sparse.cost_model.layer_times import Rates, layer_time
from chipsparse.sparse.cost_model.relative_cost import asked_cost, sparse_cost, why_skipping
from chipsparse.sparse.plan import CACHED, SparsityPlan
from chipsparse.sparse.plan_notes import plan_notes

NAMED = ("faithful", "balanced", "fast", "draft")
USUAL = ("block_means", "dense")  # rule of attention, MLP
CHIPMUNK = ("difference", 0.3)
FIRST_DENSE = LayerBudget(index="0", attention="dense", mlp="dense")
# Columns of `chipmunk`, where they are not those of the medium.
COLUMNS = {
    "CogVideoXTransformer3DModel": 0.12,
    "HiDreamImageTransformer2DModel": 0.25,
    "SD3Transformer2DModel": 0.25,
}
TWO_EXPERTS = {"faithful": 0.3, "balanced": 0.2, "fast": 0.1, "draft": 0.05, "chipmunk": 0.1}
# Latents of a usual size, where those of 480x832x81 or 1024x1024 are none.
SIZES = {
    "Cosmos3OmniTransformer": (48, 45, 80),
    "HeliosTransformer3DModel": (9, 48, 80),
    "HunyuanVideoTransformer3DModel": (33, 90, 160),
    "LTX2VideoTransformer3DModel": (16, 16, 24),
    "LTXVideoTransformer3DModel": (16, 16, 24),
    "MiniMaxH3Transformer3DModel": (72, 48, 84),
}
EACH = [*((name, 1) for name in profile_classes()), ("WanTransformer3DModel", 2)]


def named(case):
    name, experts = case
    return name if experts == 1 else f"{name}, two experts"


def is_image(name):
    return find_profile(None, name).qualities["fast"].tile == (1, 8, 16)


@pytest.mark.parametrize("case", EACH, ids=named)
def test_the_effective_config_of_every_class_and_quality(case):
    """MLPs are dense in all but what was published first: sparse ones lost 3 to 5 dB."""
    name, experts = case
    profile = find_profile(None, name, experts=experts)
    assert tuple(profile.qualities) == tuple(QUALITIES)
    for quality, config in profile.qualities.items():
        own = config.attention.delta_rule, config.mlp.density
        assert own == (CHIPMUNK if quality == "chipmunk" else USUAL), quality
        columns = 0.1
        if experts == 2:
            columns = TWO_EXPERTS[quality]
        elif quality == "chipmunk":
            columns = COLUMNS.get(name, 0.175 if is_image(name) else 0.1)
        assert config.attention.density == columns, quality
        assert config.tile == ((1, 8, 16) if is_image(name) else (4, 4, 8))
        first = () if quality == "chipmunk" or experts == 2 else (FIRST_DENSE,)
        assert (config.layers, config.block_size) == (first, 128)
        assert config.attention.precision == "model"


# Each quality is faster than the one before.


def layout_of(name, size=None):
    family = FAMILIES[name]
    config = default_arguments(getattr(diffusers, name))
    usual = (1, 128, 128) if is_image(name) else (21, 60, 104)
    return family.planned_layout(config, latents=size or SIZES.get(name, usual), text_tokens=0)


def prices(config, layout):
    """A step of each action over a dense one, by the cost model."""
    plan = SparsityPlan(config, layout)

    def seconds(action):
        times = (
            layer_time(layer, action, plan=plan, rates=Rates(), dtype=torch.bfloat16)
            for layer in range(layout.layers)
        )
        return sum(time.total for time in times)

    return {action: seconds(action) / seconds(Action.DENSE) for action in Action}


SMALL = ModelLayout((LayerKind("block", 2, 512),), 2, 64, 1, ((4, 8, 8),))


@functools.cache
def steps_of(schedule, steps, cost):
    """How often each action is taken where a sparse step has this cost."""
    config = SparsityConfig(schedule=schedule)
    return Counter(SparsityPlan(config, SMALL, steps, sparse_cost=cost).actions())


def seconds(config, steps, of_actions, cost):
    taken = steps_of(config.schedule, steps, cost)
    return sum(of_actions[action] * count for action, count in taken.items())


STEP_NUMBERS = range(4, 61)


def check_order(qualities, of_quality, costs, least=1.15):
    """Fails where a quality is not as much faster than the one before it, above 9 steps."""
    for steps in STEP_NUMBERS:
        times = [seconds(qualities[name], steps, of_quality[name], costs[name]) for name in NAMED]
        bound = least if steps >= 10 else 1.0
        for (slow, slower), (quick, faster) in itertools.pairwise(zip(NAMED, times, strict=True)):
            assert slower / faster >= bound - 1e-9, (steps, slow, quick, slower / faster)


@pytest.mark.parametrize("case", EACH, ids=named)
def test_each_quality_is_faster_than_the_one_before_by_the_classs_own_prices(case):
    name, experts = case
    family = FAMILIES[name]
    qualities = find_profile(None, name, experts=experts).qualities
    least = {None: 1.15}
    if is_image(name):
        least[1, 512, 512] = 1.15
    if experts == 2:  # nothing is skipped, and at 480p sparse steps save less
        least = {(21, 90, 160): 1.15, (21, 60, 104): 1.08}
    for size, bound in least.items():
        layout = layout_of(name, size)
        costs = {
            quality: asked_cost(qualities[quality], layout, family.sparse.masked)
            for quality in NAMED
        }
        own = {quality: prices(qualities[quality], layout) for quality in NAMED}
        check_order(qualities, own, costs, bound)


GENERAL = find_profile(None, "WanTransformer3DModel").qualities
IMAGES = find_profile(None, "FluxTransformer2DModel").qualities


@pytest.mark.parametrize("qualities", [GENERAL, IMAGES], ids=["videos", "images"])
@pytest.mark.parametrize("refresh", [1.05, 1.15, 1.25])
def test_each_quality_is_faster_whatever_a_sparse_step_costs(qualities, refresh):
    """Measured were refreshes of 1.12 to 1.25 dense steps, and sparse ones of 0.27 and more."""
    for percent in range(15, 101):
        of_actions = {Action.DENSE: 1.0, Action.REFRESH: refresh, Action.SKIP: 0.0}
        of_actions[Action.SPARSE] = percent / 100
        check_order(
            qualities,
            dict.fromkeys(NAMED, of_actions),
            dict.fromkeys(NAMED, percent / 100),
        )


# Which schedule is taken.


def planned(config, layout, masked=(), steps=50):
    return SparsityPlan(config, layout, steps, sparse_cost=asked_cost(config, layout, masked))


def why_skipped(config, layout, masked=(), steps=50):
    return why_skipping(planned(config, layout, masked, steps))


def test_small_videos_and_images_skip_and_large_ones_have_sparse_steps():
    image = IMAGES["balanced"]
    for side, expected in ((128, True), (256, True), (512, False)):
        layout = layout_of("FluxTransformer2DModel", (1, side, side))
        assert (why_skipped(image, layout) is not None) is expected
    small, large = (
        layout_of("WanTransformer3DModel", (21, *size)) for size in ((60, 104), (90, 160))
    )
    own = GENERAL["balanced"]
    form = own.schedule.form
    assert isinstance(form, ByCost)
    assert planned(own, large).schedule.actions() == resolve(form.mixed, Run(50)).actions()
    assert planned(own, small).schedule.actions() == resolve(form.skipping, Run(50)).actions()
    assert form.skipping == Spread(0.32, at_least=8)
    cost = sparse_cost(own, small)
    assert why_skipped(own, small) == (
        f"no step is sparse: at this size one takes {cost:.0%} of a dense step's time, and "
        "schedule.by_cost.at_most is 42%; steps are skipped instead"
    )


def test_the_cost_is_the_same_for_all_branches_processes_and_samples():
    layout = layout_of("FluxTransformer2DModel", (1, 512, 512))
    others = (
        replace(layout, text_tokens=512),
        replace(layout, batch=2, samples=(0, 1)),
        replace(layout, share=replace(layout.own, heads=3, tokens=9)),
        replace(layout, padding_rows=5),
    )
    costs = {sparse_cost(IMAGES["fast"], each) for each in (layout, *others)}
    assert len(costs) == 1


def test_what_is_masked_has_no_sparse_step():
    layout = layout_of("FluxTransformer2DModel", (1, 512, 512))
    config = IMAGES["fast"]
    assert sparse_cost(config, layout, {"attention": "masked"}) is None
    said = "no step is sparse, since no layer can be: steps are skipped instead"
    assert why_skipped(config, layout, ["attention"]) == said
    both = config.override({"mlp.density": 0.3})
    alone = sparse_cost(both, layout, ["attention"])
    assert sparse_cost(both, layout) < sparse_cost(config, layout) < alone < 1


def test_nothing_is_said_where_nothing_is_skipped_or_all_actions_are_listed():
    small = layout_of("WanTransformer3DModel", (21, 60, 104))
    own = GENERAL["balanced"]
    assert why_skipped(own, small, steps=9) is not None
    assert [why_skipped(own, small, steps=steps) for steps in (1, 2, 8, None)] == [None] * 4
    by_actions = own.override({"schedule.actions": ["dense", "refresh", "sparse", "skip"]})
    assert asked_cost(by_actions, small) == 0.0  # without any computation
    assert why_skipped(by_actions, small) is None


def test_what_a_user_asks_for_on_top_of_a_quality_holds_where_sparse_steps_are_dear():
    """Whatever a sparse step costs, the fields that were named say what is computed."""
    small = layout_of("WanTransformer3DModel", (21, 60, 104))
    own = GENERAL["balanced"]
    for changes in (
        {"schedule.spread.full": 0.5},
        {"schedule.spread": {"full": 0.18, "at_least": 20}},
        {"schedule.spread": {"full": 0.18, "sparse": 1}},
        {"schedule.listed.full": [0, 10, 20]},
        {"schedule.actions": ["dense", "refresh", "sparse"]},
    ):
        config = own.override(changes)
        taken = planned(config, small).actions()
        assert taken == SparsityPlan(config, small, 50, sparse_cost=1.0).actions(), changes
        assert taken == SparsityPlan(config, small, 50, sparse_cost=0.0).actions(), changes
        assert taken != planned(own, small).actions(), changes
        assert why_skipped(config, small) is None, changes


def test_what_is_said_to_help_does_where_sparse_steps_are_dear():
    small = layout_of("WanTransformer3DModel", (21, 60, 104))
    own = GENERAL["balanced"]
    said = why_nothing(planned(own, small, steps=6))
    assert said.text.endswith("or lower schedule.by_cost.skipping.at_least (now 8)")
    config = own.override({"schedule.by_cost.skipping.at_least": 2})
    plan = planned(config, small, steps=6)
    assert why_nothing(plan) is None
    assert not set(CACHED).isdisjoint(plan.actions())


def test_nothing_of_a_named_quality_is_said_to_have_no_effect():
    for name in ("WanTransformer3DModel", "FluxTransformer2DModel", "ChromaTransformer2DModel"):
        layout = layout_of(name)
        profile = find_profile(None, name)
        for quality in QUALITIES:
            own = profile.of_quality(quality)
            assert plan_notes(planned(own.sparsity, layout), base=own.base) == []
