"""The error model on measurements that follow a known law, and its sums by hand."""

import math

import numpy as np
import pytest

from chipsparse.plan import Action
from chipsparse.tuning.error_model import ErrorModel
from chipsparse.tuning.probes import BUDGETS

STEPS, LAYERS, ANCHORS, AGES = 12, 3, (1, 5, 9), (1, 2, 4)
D, R, S, K = Action.DENSE, Action.REFRESH, Action.SPARSE, Action.SKIP


def error(part, layer, budget, anchor, age):
    """Grows with age, shrinks with the budget and towards the end."""
    kind = 1.0 if part == "attention" else 0.5
    return kind * (layer + 1) * 0.01 * (1 - budget) * math.sqrt(age) * math.exp(-0.1 * anchor)


def passed(part, layer):
    return 0.3 / (layer + 1) * (1.0 if part == "attention" else 2.0)


def gain(kind, step):
    return (4.0 if kind == "sparse" else 1.0) * math.exp(-0.2 * step)


def recording():
    errors = [
        {
            "part": part,
            "layer": layer,
            "branch": branch,
            "anchor": anchor,
            "age": age,
            "error": [error(part, layer, b, anchor, age) for b in BUDGETS[part]],
        }
        for part in BUDGETS
        for layer in range(LAYERS)
        for branch in ("cond", "uncond")
        for anchor in ANCHORS
        for age in AGES
        if anchor + age < STEPS
    ]
    disturbed = []
    for step in (3, 10):
        singles = [
            {
                "step": step,
                "branch": "cond",
                "part": part,
                "layers": [layer],
                "passed": 0.2,
                "change": 0.2 * passed(part, layer),
            }
            for part in BUDGETS
            for layer in range(LAYERS)
        ]
        total = math.sqrt(sum(each["change"] ** 2 for each in singles))
        together = {"part": "all", "layers": [0, 1, 2], "passed": 1.0, "change": 1.5 * total}
        disturbed += [*singles, {**singles[0], **together}]
    skipped = [
        {"step": step, "branch": "cond", "age": age, "change": 0.02 * age}
        for step in range(STEPS)
        for age in (1, 2, 3)
        if step - age >= 0
    ]
    return {"errors": errors, "disturbed": disturbed, "skipped": skipped}


GAINS = [
    {"step": step, "error": kind, "change": 0.1, "squared_error": 0.01 * gain(kind, step)}
    for kind in ("sparse", "skip")
    for step in (0, 11)
]


@pytest.fixture
def model():
    return ErrorModel([recording()], GAINS, STEPS)


def test_measurements_are_interpolated_in_their_logarithms(model):
    for part in BUDGETS:
        for layer in range(LAYERS):
            for refresh in (1, 2, 4, 7):
                for age in (1, 2, 3, 4, 6):  # 6 lies beyond what was measured
                    expected = [error(part, layer, b, refresh, age) ** 2 for b in BUDGETS[part]]
                    found = model.error[part][layer, :, refresh, age]
                    np.testing.assert_allclose(found, expected, rtol=1e-6)
            np.testing.assert_allclose(model.passed[part][layer], passed(part, layer) ** 2)
    for kind in ("sparse", "skip"):
        expected = [gain(kind, step) for step in range(STEPS)]
        np.testing.assert_allclose(model.gain[kind], expected, rtol=1e-6)
    assert model.joint == pytest.approx(1.5**2)


def test_a_schedule_sums_what_its_steps_make_and_carry(model):
    actions = [D, R, S, K, K, R, S, K, D, S, D, D]
    made = model.of_schedule(actions)
    # Runs of skipped steps, with the steps since one was computed.
    runs = [{3: 1, 4: 2}, {7: 1}]
    fixed = sum(
        sum(math.sqrt(gain("skip", step)) * 0.02 * age for step, age in run.items()) ** 2
        for run in runs
    )
    assert made.fixed == pytest.approx(fixed)
    # Sparse steps by the step whose caches they read, each with those that repeat it: a dense step
    # fills the caches of the MLP, but not the residual of the attention.
    sparse = {
        "attention": {1: {2: (2, 3, 4)}, 5: {6: (6, 7), 9: (9,)}},
        "mlp": {1: {2: (2, 3, 4)}, 5: {6: (6, 7)}, 8: {9: (9,)}},
    }
    for part in BUDGETS:
        for layer in range(LAYERS):
            for i, budget in enumerate(BUDGETS[part]):
                roots = [
                    sum(
                        sum(math.sqrt(gain("sparse", each)) for each in repeated)
                        * error(part, layer, budget, full, step - full)
                        for step, repeated in steps.items()
                    )
                    for full, steps in sparse[part].items()
                ]
                expected = 1.5**2 * passed(part, layer) ** 2 * sum(root**2 for root in roots)
                assert made.of[part][layer, i] == pytest.approx(expected, rel=1e-5)


def test_a_dense_schedule_is_exact(model):
    made = model.of_schedule([D] * STEPS)
    assert made.fixed == 0
    assert not any(errors.any() for errors in made.of.values())


def test_skips_older_than_what_was_measured_grow_with_their_age(model):
    made = model.of_schedule([D, D, *[K] * 6, D, D, D, D])
    expected = sum(math.sqrt(gain("skip", 1 + age)) * 0.02 * age for age in range(1, 7)) ** 2
    assert made.fixed == pytest.approx(expected)


def test_branches_and_prompts_are_averaged():
    one, other = recording(), recording()
    for entry in other["errors"]:
        entry["error"] = [3 * each for each in entry["error"]]
    both = ErrorModel([one, other], GAINS, STEPS)
    alone = ErrorModel([one], GAINS, STEPS)
    np.testing.assert_allclose(
        both.error["mlp"][:, :, 1, 1:], 5 * alone.error["mlp"][:, :, 1, 1:], rtol=1e-6
    )
