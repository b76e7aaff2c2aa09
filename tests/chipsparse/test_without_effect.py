"""Fields that ask for something which the model or the schedule cannot do are told, once."""

import dataclasses

import pytest

from chipsparse.config import SparsityConfig
from chipsparse.plan import SparsityPlan
from chipsparse.profiles.profile import ASSETS, load_profile
from chipsparse.without_effect import _of_memory, _of_parts, _of_schedule
from tests.chipsparse.test_plan import LAYOUT

NO_ATTENTION = {"attention.density": "dense"}
NO_MLP = {"mlp.density": "dense"}
NO_SPARSE = {"schedule.full_share": 0.5, "schedule.between": "none"}
ACTIONS = {"schedule.actions": ["dense", "refresh", "sparse"]}


def notes(values, steps=12, **kwargs):
    return SparsityPlan(SparsityConfig().override(values), LAYOUT, steps).notes(**kwargs)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        (NO_SPARSE, None),
        (NO_ATTENTION | NO_MLP, None),
        (
            NO_ATTENTION | {"attention.random_fraction": 0.1, "tile": [1, 8, 8]},
            "attention.random_fraction (0.1), tile ([1, 8, 8]) have no effect: "
            "attention.density is dense",
        ),
        (
            NO_SPARSE | {"attention.density": 0.0, "mlp.density": 0.5, "memory.ram": "2G"},
            "attention.density (0.0), mlp.density (0.5), memory.ram (2.00 GiB) have no effect: no "
            "step is sparse",
        ),
        (
            {"attention.random_fraction": 0.001},
            "attention.random_fraction (0.001) has no effect: attention.random_fraction adds no "
            "column",
        ),
        (
            {"memory.offload": "never", "memory.ram": 0},
            "memory.ram (0 B) has no effect: memory.offload is never",
        ),
        (
            NO_ATTENTION | NO_MLP | {"block_size": 64},
            "block_size (64) has no effect: mlp.density is dense",
        ),
        (
            ACTIONS | {"schedule.warmup_steps": 3, "schedule.refresh_every": 4},
            "schedule.warmup_steps (3), schedule.refresh_every (4) have no effect: "
            "schedule.actions overrides it",
        ),
        (ACTIONS | {"schedule.first_dense_layers": 1, "schedule.correct": False}, None),
        (
            {"schedule.forecast": 0.5},
            "schedule.forecast (0.5) has no effect: no step is skipped",
        ),
        (
            {"schedule.full_steps": [1, 2, 3], "schedule.forecast_after": 0.3},
            "schedule.forecast_after (0.3) has no effect: schedule.forecast is not given",
        ),
        (
            {
                "schedule.actions": ["dense", "skip", "refresh", "sparse"],
                "schedule.forecast": 0.5,
                "schedule.forecast_after": 0.9,
            },
            "schedule.forecast (0.5) has no effect: schedule.forecast_after lets no skipped step "
            "have one",
        ),
        (
            {"schedule.full_steps": [0, 2, 4, 6, 8, 10]},
            "schedule.between ('middle') has no effect: no gap between full steps is long enough",
        ),
        ({"schedule.full_steps": [0, 2, 4, 6, 8, 10], "schedule.between": "none"}, None),
        (
            NO_ATTENTION | NO_MLP | {"schedule.full_steps": [1], "schedule.between": [3]},
            "schedule.between ([3]) has no effect: no layer is sparse",
        ),
        (
            {"schedule.between": "all"},
            "schedule.between ('all') has no effect: no full steps are listed",
        ),
        (
            {"schedule.least_full": 4, "schedule.full_steps": [1, 5]},
            "schedule.least_full (4) has no effect: schedule.full_share is not given",
        ),
        (
            {"schedule.full_steps": [1, 4, 12]},
            "full_steps 12 are never reached: the last of 12 steps is 11",
        ),
        (
            NO_ATTENTION | NO_MLP | {"schedule.warmup_steps": 4, "schedule.first_dense_layers": 1},
            "schedule.warmup_steps (4), schedule.first_dense_layers (1) have no effect: no layer "
            "is sparse",
        ),
        (
            {"layers": [{"layers": 1, "attention": 0.1}]},
            "layers[0].attention (0.1) has no effect: it is attention.density",
        ),
        (
            {"layers": [{"layers": 1}]},
            "layers[0] ('1') has no effect: it names neither attention nor mlp",
        ),
        (
            {"layers": [{"layers": 0, "mlp": 0.5}], "schedule.first_dense_layers": 1},
            "layers[0].mlp (0.5) has no effect: schedule.first_dense_layers is 1",
        ),
        (
            {"layers": [{"layers": f"0-{LAYOUT.layers - 1}", "mlp": 0.5}], "mlp.density": 0.2},
            "mlp.density (0.2) has no effect: layers has a budget for every layer",
        ),
    ],
)
def test_what_is_without_effect_and_why(values, expected):
    assert notes(values) == ([] if expected is None else [expected])


def test_what_a_cpu_takes_the_effect_of():
    assert notes({"memory.vram": "1G"}) == []
    assert notes({"memory.vram": "1G"}, on_cpu=True) == [
        "memory.vram (1.00 GiB) has no effect: this device is a CPU"
    ]


# Of these a config has no value that asks for something which may be impossible: they turn things
# on or off, choose between forms, or have notes of their own.
WITHOUT_REASON = {
    *("attention.precision",),
    *(f"schedule.{name}" for name in ("full_steps", "full_share", "correct")),
    *("schedule.actions", "layers"),
}


def test_every_field_is_looked_at():
    plan = SparsityPlan(SparsityConfig(), LAYOUT, 12)
    looked_at = {*_of_parts(plan), *_of_schedule(plan), *_of_memory(plan, False)}
    fields = set()
    for item in dataclasses.fields(SparsityConfig):
        value = getattr(plan.config, item.name)
        below = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        fields |= {f"{item.name}.{each.name}" for each in below} or {item.name}
    assert fields - looked_at == WITHOUT_REASON
    assert looked_at <= fields


@pytest.mark.parametrize(
    "path",
    [*(ASSETS / "profiles").glob("*.yaml"), *ASSETS.glob("tiny-*/chipsparse.yaml")],
    ids=lambda path: path.parent.name + path.stem,
)
def test_nothing_of_bundled_profiles_is_told(path):
    for config in load_profile(path).qualities.values():
        for steps in (8, 50):
            assert SparsityPlan(config, LAYOUT, steps).notes() == []


def test_what_a_quality_stands_for_is_not_told_but_what_is_added_to_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "sparsity: {tile: [1, 8, 8]}\n"
        "qualities: {faithful: {schedule: {full_share: 0.5, between: none, forecast_after: 0.3}}}"
    )
    config = load_profile(path).of_quality("faithful").sparsity.override({"memory.ram": "1G"})
    assert SparsityPlan(config, LAYOUT, 50).notes() == [
        "schedule.forecast_after (0.3) has no effect: schedule.forecast is not given",
        "memory.ram (1.00 GiB) has no effect: no step is sparse",
    ]
    path.write_text("tuned: {model: a}\nsparsity: {attention: {density: dense}, tile: null}")
    assert SparsityPlan(load_profile(path).sparsity, LAYOUT, 50).notes() == []
