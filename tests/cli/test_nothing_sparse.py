"""A generation with too few steps for its profile is never silently dense."""

import dataclasses

import pytest

from chipsparse.cli.generation import denoise
from chipsparse.cli.planning.sparse_steps import too_few_steps
from chipsparse.config import SparsityConfig
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.plan import SparsityPlan

LAYOUT = ModelLayout(
    kinds=(LayerKind("block", layers=2, intermediate_size=64),),
    heads=2,
    head_dim=16,
    batch=1,
    grids=((2, 4, 4),),
)


def plan(steps, **changes):
    config = SparsityConfig().override({f"schedule.{name}": v for name, v in changes.items()})
    return SparsityPlan(config, LAYOUT, steps)


@pytest.mark.parametrize(
    ("steps", "changes", "enough"),
    [
        (6, {"warmup_steps": 8}, 11),
        (1, {"warmup_steps": 2}, 3),
        (2, {"actions": ["dense", "refresh", "sparse"]}, 3),
        (2, {"full_share": 0.3}, 3),
        (8, {"full_share": 0.3, "least_full": 8}, 9),
        (4, {"full_steps": [1, 2, 3]}, 5),
        (5, {"full_steps": [1, 2, 3, 4]}, 6),
    ],
)
def test_the_fewest_steps_are_named(steps, changes, enough):
    why = too_few_steps(plan(steps, **changes))
    assert f"--steps {enough} or more" in why
    assert ("the only step" if steps == 1 else f"all {steps} steps") in why
    assert too_few_steps(plan(enough, **changes)) is None
    assert too_few_steps(plan(enough - 1, **changes)) is not None


@pytest.mark.parametrize(
    ("steps", "changes", "advice"),
    [
        (4, {"full_share": 0.9}, "lower schedule.full_share (now 0.9)"),
        (8, {"full_share": 0.3, "least_full": 8}, "lower schedule.least_full (now 8)"),
        (6, {"warmup_steps": 8}, "lower schedule.warmup_steps (now 8)"),
        (2, {"actions": ["dense", "refresh", "sparse"]}, "change schedule.actions"),
    ],
)
def test_the_field_that_computes_too_many_is_named(steps, changes, advice):
    assert too_few_steps(plan(steps, **changes)).endswith(f" or more, or in the profile {advice}")


def test_no_field_is_named_that_is_at_its_least():
    assert too_few_steps(plan(2, warmup_steps=2)).endswith("it takes --steps 3 or more")
    assert too_few_steps(plan(2, full_share=0.01)).endswith("it takes --steps 3 or more")


def test_a_profile_that_wants_nothing_sparse_says_nothing():
    config = SparsityConfig().override({"attention.enabled": False, "mlp.enabled": False})
    assert too_few_steps(SparsityPlan(config, LAYOUT, 5)) is None
    assert too_few_steps(plan(2, actions=["dense"])) is None


def test_skipped_steps_are_a_gain():
    assert too_few_steps(plan(3, actions=["dense", "refresh", "skip"])) is None


def test_a_pipeline_that_begins_later():
    assert too_few_steps(plan(10, warmup_steps=2), lambda steps: steps - 3) is None
    assert "all 2 steps" in too_few_steps(plan(10, warmup_steps=2), lambda steps: steps * 4 // 5)


FEW = ("-o", "o.png", "--frames", "1", "--steps", "2")


def test_the_command_warns_before_loading_and_in_its_results(generate):
    ran = generate(*FEW, "--json")
    (warning,) = ran.json()["warnings"]
    assert "computes all 2 steps in full; it takes --steps 3 or more" in warning
    first, second, *_ = ran.stderr.splitlines()
    assert (first, second) == (f"chipsparse: warning: {warning}", "loading the model")
    ran = generate(*FEW)
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert "gain none: nothing ran sparse" in lines
    assert f"warning {warning}" in lines


def test_strict_refuses_before_loading(generate, workdir, loads_nothing):
    assert "it takes --steps 3 or more" in generate(*FEW, "--strict").refused()
    assert list(workdir.iterdir()) == []


def test_dense_runs_are_dense_on_purpose(generate):
    assert generate(*FEW, "--dense", "--json").json()["warnings"] == []


def test_what_the_report_says_is_shown(generate, monkeypatch):
    made = denoise.generate

    def generation(*arguments, **options):
        return dataclasses.replace(made(*arguments, **options), nothing_sparse="of a reason")

    monkeypatch.setattr(denoise, "generate", generation)
    ran = generate("-o", "o.png", "--frames", "1", "--json")
    content = ran.json()
    assert content["warnings"] == ["of a reason"]
    assert content["sparse"]["nothing_sparse"] == "of a reason"
    assert "chipsparse: warning: of a reason\n" in ran.stderr
