"""Fields that ask for something which the model or the schedule cannot do are told, once."""

import dataclasses

import pytest
import yaml

from chipsparse.config import SparsityConfig
from chipsparse.profiles.profile import default_profile, load_profile
from chipsparse.sparse.plan import SparsityPlan
from chipsparse.sparse.plan_notes import plan_notes
from chipsparse.without_effect import _reasons
from tests.chipsparse.sparse.test_plan import LAYOUT

DENSE = "attention.density: dense, mlp.density: dense"
NOTHING_SPARSE = "schedule.spread.full: 0.5"
ACTIONS = "schedule.actions: [dense, refresh, sparse]"
# Changes of a config; the fields of them that have no effect, and why.
CASES = {
    "": "",
    NOTHING_SPARSE: "",
    DENSE: "",
    f"{ACTIONS}, schedule.correct: false": "",
    "schedule.listed.full: [0, 2, 4, 6, 8, 10]": "",
    "attention: {density: dense, delta_rule: difference}, tile: [1, 8, 8]": (
        "attention.delta_rule ('difference'), tile ([1, 8, 8]): attention.density is dense"
    ),
    f"{NOTHING_SPARSE}, attention.density: 0.0, mlp.density: 0.5, memory.ram: 2G": (
        "attention.density (0.0), mlp.density (0.5), memory.ram (2.00 GiB): no step is sparse"
    ),
    "memory: {offload: never, ram: 0}": "memory.ram (0 B): memory.offload is never",
    f"{DENSE}, block_size: 64": "block_size (64): mlp.density is dense",
    "schedule.forecast: 0.5": "schedule.forecast (0.5): no step is skipped",
    "schedule: {listed.full: [1, 2, 3], forecast_after: 0.3}": (
        "schedule.forecast_after (0.3): schedule.forecast is not given"
    ),
    f"{DENSE}, schedule.listed: {{full: [1], sparse: [3]}}": (
        "schedule.listed.sparse ([3]): no layer is sparse"
    ),
    f"{DENSE}, schedule.listed: {{full: [1], sparse: others}}": (
        "schedule.listed.sparse ('others'): no layer is sparse"
    ),
    f"{DENSE}, schedule.spread: {{full: 0.5, sparse: 0.2}}": (
        "schedule.spread.sparse (0.2): no layer is sparse"
    ),
    "schedule.spread: {full: 0.5, sparse: 0.01}": (
        "schedule.spread.sparse (0.01): no skipped interval has room for one, or it rounds to none"
    ),
    f"{DENSE}, schedule.periodic: {{warmup: 4, refresh_every: 3}}": (
        "schedule.periodic.warmup (4), schedule.periodic.refresh_every (3): no layer is sparse"
    ),
    "layers: [{index: 1}]": "layers[0] ('1'): it names neither attention nor mlp",
    "attention.density: dense, layers: [{index: 0, attention: 0.5}], mlp.density: 0.3": (
        "layers[0].attention (0.5): attention.density is dense"
    ),
}


def notes(changes, **options):
    config = SparsityConfig()
    for path, value in yaml.safe_load(f"{{{changes}}}").items():
        nested = value if isinstance(value, dict) else {}
        paths = {f"{path}.{name}": below for name, below in nested.items()}
        config = config.override(paths or {path: value})
    return plan_notes(SparsityPlan(config, LAYOUT, 12), **options)


@pytest.mark.parametrize(("changes", "said"), CASES.items())
def test_what_is_without_effect_and_why(changes, said):
    fields, _, reason = said.partition(": ")
    has = "have" if fields.count(" (") > 1 else "has"
    assert notes(changes) == ([f"{fields} {has} no effect: {reason}"] if fields else [])


def test_what_a_cpu_takes_the_effect_of():
    assert notes("memory.vram: 1G") == []
    (note,) = notes("memory.vram: 1G", on_cpu=True)
    assert note == "memory.vram (1.00 GiB) has no effect: this device is a CPU"


# A config has no value of these that asks for something which may be impossible: they turn things
# on or off, or have notes of their own.
WITHOUT_REASON = {"attention.precision", "layers", "schedule.form", "schedule.correct"}


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
        "  faithful: {schedule: {spread: {full: 0.5}, forecast_after: 0.3}}",
    )
    profile = load_profile(path).of_quality("faithful").override({"memory.ram": "1G"})
    plan = SparsityPlan(profile.sparsity, LAYOUT, 50)
    assert plan_notes(plan, base=profile.base) == [
        "schedule.forecast_after (0.3) has no effect: schedule.forecast is not given",
        "memory.ram (1.00 GiB) has no effect: no step is sparse",
    ]
    # The common part is its base.
    assert plan_notes(plan)[0].startswith("tile ([1, 8, 8]), memory.ram")
    path.write_text("tuned: {model: a}\nsparsity: {attention: {density: dense}, tile: null}")
    tuned = load_profile(path)
    assert plan_notes(SparsityPlan(tuned.sparsity, LAYOUT, 50), base=tuned.base) == []
    bundled = default_profile()
    assert bundled.base == bundled.sparsity
    assert bundled.of_quality("fast").base == bundled.qualities["fast"]
