"""Quality and speed in one row are of one config: digests, prices of steps, and who joins them."""

import pytest

from benchmarks import prices
from benchmarks.models import MODELS, STEPS
from benchmarks.moving_photographs import evaluate
from benchmarks.prices import (
    PRICED_AS,
    computed_prices,
    measured_prices,
    priced,
    prices_of,
    speed_of,
)
from chipsparse.config import Action
from chipsparse.experiments.engine import config_digest, step_digest
from chipsparse.profiles.profile import find_profile
from docs.tables import measured

LARGE = MODELS[PRICED_AS]
# As they are taken where sparse steps cost little.
QUALITIES = {
    name: LARGE.decided(config)
    for name, config in find_profile(None, "WanTransformer3DModel").qualities.items()
}
BALANCED = QUALITIES["balanced"]


def speed(schedule, config, sparse_ms, **fields):
    """A record of a full-size model whose stock step takes 100 ms."""
    return {
        "case": PRICED_AS,
        "schedule": schedule,
        "config": config_digest(config),
        "step_config": step_digest(config),
        "baseline_step_ms": 100.0,
        "dense_ms": 101.0,
        "refresh_ms": 115.0,
        "sparse_ms": sparse_ms,
        "skip_ms": 0.1,
        **fields,
    }


def clip(setting, config, **fields):
    return {
        "method": "ours",
        "variant": "qualities",
        "setting": setting,
        "refused": None,
        "config": config_digest(config),
        "step_config": step_digest(config),
        "calls": {"dense": 2, "refresh": 1, "sparse": 3, "skip": 4},
        "work": 0.7,
        **fields,
    }


def test_digests_tell_what_is_computed_and_nothing_else():
    launched = BALANCED.override({"cuda_graphs": "never", "memory.vram": "1G"})
    assert config_digest(launched) == config_digest(BALANCED)
    other_list = BALANCED.override({"schedule.spread.full": 0.2})
    assert config_digest(other_list) != config_digest(BALANCED)
    assert step_digest(other_list) == step_digest(BALANCED)
    for changes in (
        {"mlp.density": 0.3},
        {"attention.density": 0.2},
        {"attention.delta_rule": "difference"},
        {"layers": []},
        {"layers": [{"index": 1, "attention": "dense"}]},
        {"tile": None},
    ):
        assert step_digest(BALANCED.override(changes)) != step_digest(BALANCED)


def test_the_model_that_quality_is_of_and_the_one_that_speed_is_of_have_one_config():
    ways = {way.setting: way for way in evaluate.ways(STEPS) if way.variant == evaluate.QUALITIES}
    for name, config in LARGE.qualities().items():
        assert config_digest(ways[name].config) == config_digest(LARGE.decided(config))


def test_a_step_is_priced_by_measured_steps_of_its_config_alone():
    sparse_mlp = BALANCED.override({"mlp.density": 0.3})
    records = [speed("balanced", BALANCED, 28.0), speed("balanced", sparse_mlp, 22.0)]
    records.append(speed("balanced", BALANCED, 50.0, case="wan1b_480p"))
    found = measured_prices(records, BALANCED).by_action
    assert found[Action.SPARSE] == pytest.approx(0.28)
    assert measured_prices(records, sparse_mlp).by_action[Action.SPARSE] == pytest.approx(0.22)
    assert found[Action.REFRESH] == pytest.approx(1.15)
    other = measured_prices(records, BALANCED.override({"attention.density": 0.2}))
    assert other.by_action.keys() == {Action.DENSE, Action.SKIP}  # which are the same for all
    assert other.cost({"dense": 2, "skip": 2}) == pytest.approx((2 * 1.01 + 2 * 0.001) / 4)
    with pytest.raises(ValueError, match="no sparse step of hunyuan_720p was measured with"):
        other.cost({"dense": 1, "sparse": 1})


def test_what_was_not_run_is_computed_and_says_so(monkeypatch):
    monkeypatch.setattr(prices, "full_size_records", list)
    assert prices_of(BALANCED) == computed_prices(BALANCED)
    computed = prices_of(BALANCED)
    assert not computed.measured
    assert 0.2 < computed.by_action[Action.SPARSE] < 0.35
    assert computed.by_action[Action.DENSE] == 1
    sparse_mlp = computed_prices(BALANCED.override({"mlp.density": 0.3}))
    assert sparse_mlp.by_action[Action.SPARSE] < computed.by_action[Action.SPARSE]
    assert "those steps were not run" in measured.photographs_in_short()
    run = [speed(name, QUALITIES[name], 28.0) for name in evaluate.COMPARED]
    for module in (prices, measured):
        monkeypatch.setattr(module, "full_size_records", lambda: run)
    assert prices_of(BALANCED).measured
    assert "those steps were not run" not in measured.photographs_in_short()


def test_clips_of_ours_cost_what_their_steps_do_and_others_their_work():
    known = {step_digest(BALANCED): measured_prices([speed("x", BALANCED, 28.0)], BALANCED)}
    other = {"method": "MagCache", "variant": "", "setting": "a", "refused": None, "work": 0.4}
    ours, mag = priced([clip("balanced", BALANCED), other], known)
    assert ours["cost"] == pytest.approx((2 * 1.01 + 1.15 + 3 * 0.28 + 4 * 0.001) / 10)
    assert mag["cost"] == 0.4
    sparse_mlp = BALANCED.override({"mlp.density": 0.3})
    with pytest.raises(ValueError, match=r"ours, qualities, fast: no steps of a large model have"):
        priced([clip("fast", sparse_mlp)], known)


def test_a_simulated_rule_saves_its_part_of_the_mlps():
    sparse_mlp = BALANCED.override({"mlp.density": 0.3})
    known = {
        step_digest(config): measured_prices([speed("x", config, ms)], config)
        for config, ms in ((BALANCED, 28.0), (sparse_mlp, 22.0))
    }
    thirty = {"step_config_sparse_mlp": step_digest(sparse_mlp)}
    costs = [
        priced([clip("fast", BALANCED, mlp_time=time, **thirty)], known)[0]["cost"]
        for time in (1.0, 0.4, 0.0)
    ]
    # MLPs are a tenth of a dense step here: 30 % of the neurons save 0.6 of that, which is 0.06.
    assert costs[0] - costs[1] == pytest.approx(0.3 * 0.06)
    assert costs[0] - costs[2] == pytest.approx(0.3 * 0.10)


def test_sparse_mlps_that_were_not_run_are_as_far_off_as_dense_ones(monkeypatch):
    thirty = BALANCED.override({"mlp.density": 0.3})
    monkeypatch.setattr(prices, "full_size_records", lambda: [speed("balanced", BALANCED, 14.0)])
    known = evaluate.known_prices()
    found = known[step_digest(thirty)]
    own = known[step_digest(BALANCED)]
    assert (own.measured, found.measured) == (True, False)
    computed = computed_prices(BALANCED).by_action
    expected = computed_prices(thirty).by_action
    off = 0.14 / computed[Action.SPARSE]
    assert found.by_action[Action.SPARSE] == pytest.approx(off * expected[Action.SPARSE])
    assert found.by_action[Action.REFRESH] == pytest.approx(1.15)
    assert found.by_action[Action.SPARSE] < own.by_action[Action.SPARSE]
    # One that was run is what it took.
    run = [speed("balanced", BALANCED, 14.0), speed("thirty", thirty, 13.0)]
    monkeypatch.setattr(prices, "full_size_records", lambda: run)
    assert evaluate.known_prices()[step_digest(thirty)].by_action[Action.SPARSE] == 0.13


def test_a_row_of_two_configs_is_refused():
    sparse_mlp = BALANCED.override({"mlp.density": 0.3})
    speeds = [speed("balanced", BALANCED, 28.0), speed("fast", sparse_mlp, 22.0)]
    assert speed_of(clip("balanced", BALANCED), speeds) is speeds[0]
    with pytest.raises(ValueError, match=rf"fast: .* {config_digest(sparse_mlp)}: measure one"):
        speed_of(clip("fast", QUALITIES["fast"]), speeds)
    with pytest.raises(ValueError, match="no speed of draft was measured"):
        speed_of(clip("draft", QUALITIES["draft"]), speeds)


def test_the_readme_joins_quality_and_speed_of_one_config(tmp_path, monkeypatch):
    shipped = [speed(name, QUALITIES[name], 28.0) for name in evaluate.COMPARED]
    clips = [clip(name, QUALITIES[name], cost=0.1) for name in evaluate.COMPARED]
    monkeypatch.setattr(measured, "full_size_records", lambda: shipped)
    assert len(measured.speed_columns(clips)) == 4
    older = QUALITIES["fast"].override({"mlp.density": 0.3})
    wrong = [speed("fast", older, 22.0) if r["schedule"] == "fast" else r for r in shipped]
    monkeypatch.setattr(measured, "full_size_records", lambda: wrong)
    with pytest.raises(ValueError, match="fast: its quality is of the config"):
        measured.speed_columns(clips)


def test_the_quality_records_are_of_the_shipped_configs():
    """Else they have to be made again: docs would join them with speeds of other configs."""
    for file in (measured.PHOTOGRAPHS, measured.FEW_STEPS):
        own = measured.find(measured.read(file), variant=evaluate.QUALITIES)
        shipped = {name: config_digest(config) for name, config in QUALITIES.items()}
        assert {record["setting"]: record["config"] for record in own}.items() <= shipped.items()


def test_a_speed_that_was_not_run_stands_in_brackets():
    skipping = "flux_1280x768"
    known = [speed("x", BALANCED, None, case=case) for case in (skipping, PRICED_AS)]
    images = MODELS[skipping].qualities()["balanced"]
    assert measured.speedup_text(skipping, images, known).endswith("x")
    assert "(" not in measured.speedup_text(skipping, images, known)
    text = measured.speedup_text(PRICED_AS, BALANCED, known)
    assert text.startswith("(")
    run = [replace_ms(record, 28.0) for record in known]
    actions = {"dense": 3, "refresh": 6, "sparse": 13, "skip": 28}
    cost = measured_prices(run, BALANCED).cost(actions)
    assert measured.speedup_text(PRICED_AS, BALANCED, run) == f"{1 / cost:.2f}x"
    assert sum(actions.values()) == STEPS


def replace_ms(record, sparse_ms):
    return {**record, "sparse_ms": sparse_ms}
