"""Fields that ask for something which the model or the schedule cannot do are told, once."""

import dataclasses

import pytest
import yaml

from chipsparse.config import SparsityConfig
from chipsparse.profiles.profile import load_profile
from chipsparse.sparse.plan import SparsityPlan
from chipsparse.without_effect import _reasons
from tests.chipsparse.sparse.test_plan import LAYOUT, listed

DENSE = "attention.density: dense, mlp.density: dense"
NOTHING_SPARSE = "schedule.full_share: 0.5, schedule.sparse_steps: 0"
ACTIONS = "schedule.actions: [dense, refresh, sparse]"
# Changes of a config; the fields of them that have no effect, and why.
CASES = {
    "": "",
    NOTHING_SPARSE: "",
    DENSE: "",
    f"{ACTIONS}, schedule.first_dense_layers: 1, schedule.correct: false": "",
    "schedule.full_steps: [0, 2, 4, 6, 8, 10], schedule.sparse_steps: 0": "",
    "attention: {density: dense, delta_rule: difference}, tile: [1, 8, 8]": (
        "attention.delta_rule ('difference'), tile ([1, 8, 8]): attention.density is dense"
    ),
    f"{NOTHING_SPARSE}, attention.density: 0.0, mlp.density: 0.5, memory.ram: 2G": (
        "attention.density (0.0), mlp.density (0.5), memory.ram (2.00 GiB): no step is sparse"
    ),
    "memory: {offload: never, ram: 0}": "memory.ram (0 B): memory.offload is never",
    f"{DENSE}, block_size: 64": "block_size (64): mlp.density is dense",
    f"{ACTIONS}, schedule.warmup_steps: 3, schedule.refresh_every: 4": (
        "schedule.warmup_steps (3), schedule.refresh_every (4): schedule.actions overrides it"
    ),
    "schedule.forecast: 0.5": "schedule.forecast (0.5): no step is skipped",
    "schedule: {full_steps: [1, 2, 3], forecast_after: 0.3}": (
        "schedule.forecast_after (0.3): schedule.forecast is not given"
    ),
    f"{DENSE}, schedule.full_steps: [1], schedule.sparse_steps: [3]": (
        "schedule.sparse_steps ([3]): no layer is sparse"
    ),
    "schedule.sparse_steps: 1": "schedule.sparse_steps (1.0): no full steps are listed",
    "schedule: {least_full: 4, full_steps: [1, 5]}": (
        "schedule.least_full (4): schedule.full_share is not given"
    ),
    f"{DENSE}, schedule: {{warmup_steps: 4, first_dense_layers: 1}}": (
        "schedule.warmup_steps (4), schedule.first_dense_layers (1): no layer is sparse"
    ),
    "layers: [{layers: 1}]": "layers[0] ('1'): it names neither attention nor mlp",
    "mlp.density: 0.3, layers: [{layers: 0, mlp: 0.5}], schedule.first_dense_layers: 1": (
        "layers[0].mlp (0.5): schedule.first_dense_layers is 1"
    ),
}


def notes(changes, **options):
    config = SparsityConfig()
    for path, value in yaml.safe_load(f"{{{changes}}}").items():
        nested = value if isinstance(value, dict) else {}
        paths = {f"{path}.{name}": below for name, below in nested.items()}
        config = config.override(paths or {path: value})
    return SparsityPlan(config, LAYOUT, 12).notes(**options)


@pytest.mark.parametrize(("changes", "said"), CASES.items())
def test_what_is_without_effect_and_why(changes, said):
    fields, _, reason = said.partition(": ")
    has = "have" if fields.count(" (") > 1 else "has"
    assert notes(changes) == ([f"{fields} {has} no effect: {reason}"] if fields else [])


def test_what_a_few_steps_take_the_effect_of():
    schedule = {"full_share": 0.2, "least_full": 6, "sparse_steps": 0.3}
    reason = "has no effect: of so few steps, at most the first, second and fourth are full"
    assert listed(8, **schedule).notes() == [f"schedule.least_full (6) {reason}"]


def test_what_a_cpu_takes_the_effect_of():
    assert notes("memory.vram: 1G") == []
    (note,) = notes("memory.vram: 1G", on_cpu=True)
    assert note == "memory.vram (1.00 GiB) has no effect: this device is a CPU"


# Of these a config has no value that asks for something which may be impossible: they turn things
# on or off, choose between forms, or have notes of their own.
WITHOUT_REASON = {"attention.precision", "layers"} | {
    f"schedule.{name}"
    for name in ("full_steps", "full_share", "sparse_at_most", "skipping", "correct", "actions")
}


def test_every_field_is_looked_at():
    plan = SparsityPlan(SparsityConfig(), LAYOUT, 12)
    looked_at = set(_reasons(plan, on_cpu=False))
    fields = set()
    for item in dataclasses.fields(SparsityConfig):
        value = getattr(plan.config, item.name)
        below = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        fields |= {f"{item.name}.{each.name}" for each in below} or {item.name}
    assert fields - looked_at == WITHOUT_REASON
    assert looked_at <= fields


def test_what_a_quality_stands_for_is_not_told_but_what_is_added_to_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "sparsity: {tile: [1, 8, 8]}\n"
        "qualities:\n"
        "  faithful: {schedule: {full_share: 0.5, sparse_steps: 0, forecast_after: 0.3}}",
    )
    config = load_profile(path).of_quality("faithful").sparsity.override({"memory.ram": "1G"})
    assert SparsityPlan(config, LAYOUT, 50).notes() == [
        "schedule.forecast_after (0.3) has no effect: schedule.forecast is not given",
        "memory.ram (1.00 GiB) has no effect: no step is sparse",
    ]
    path.write_text("tuned: {model: a}\nsparsity: {attention: {density: dense}, tile: null}")
    assert SparsityPlan(load_profile(path).sparsity, LAYOUT, 50).notes() == []
