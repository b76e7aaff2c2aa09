"""The benchmark of tuned profiles: what they are compared with, and what is said of them."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.peers_table import summaries
from benchmarks.tuned_rows import BUDGETS, rows, setting
from benchmarks.tuned_table import pairings
from chipsparse.profiles import bundled_model, load_profile
from tests.test_peers import PROFILE, clip
from tests.tiny_models import PROMPT, tiny_wan_pipeline

SPARSER = PROFILE.replace("keep_fraction: 0.25", "keep_fraction: 0.1") + "  layers: []\n"


def test_every_budget_is_one_for_all_layers(tmp_path):
    (tmp_path / "for40.yaml").write_text(SPARSER)
    base = load_profile(bundled_model() / "chipsparse.yaml").sparsity.override(
        {"layers": [{"layers": "0", "attention": "dense"}], "schedule.first_dense_layers": 2}
    )
    dense, *single, tuned = rows(base, 30, [tmp_path / "for40.yaml"])
    assert (dense.method, dense.config) == ("dense", None)
    assert (tuned.method, tuned.setting) == ("tuned", "for40")
    assert tuned.config == load_profile(tmp_path / "for40.yaml").sparsity
    assert len({row.setting for row in single}) == len(single) == 3 * len(BUDGETS)
    for row in single:
        config = row.config
        assert (config.layers, config.schedule.first_dense_layers) == ((), 0)
        assert row.setting.startswith(
            f"{config.attention.keep_fraction:.0%} and {config.mlp.keep_fraction:.0%}, "
            f"{config.attention.delta_rule}, "
        )
    skipped = {row.setting: len(row.config.schedule.skip_steps) for row in single}
    counts = [skipped[setting(BUDGETS[0], skips)] for skips in (0, 1, 3)]
    assert counts[0] == 0 < counts[1] < counts[2]


def test_a_profile_is_held_against_the_least_work_that_is_as_close():
    def made(method, name, psnrs, work, model="tiny"):
        return [
            clip(method, name, seed, op="tuned", model=model, psnr=psnr, work=work)
            for seed, psnr in enumerate(psnrs)
        ]

    records = [
        *made("dense", "first", (None, None), 1.0),
        *made("dense", "first", (None, None), 1.0, model="other"),
        *made("one budget", "few", (30.0, 50.0), 0.3),
        *made("one budget", "some", (36.0, 37.0), 0.5),
        *made("one budget", "many", (40.0, 41.0), 0.7),
        *made("one budget", "of another", (60.0, 60.0), 0.1, model="other"),
        *made("tuned", "for 35", (35.0, 45.0), 0.2),
        *made("tuned", "for 45", (46.0, 47.0), 0.6),
    ]
    found = pairings(summaries(records, "tuned"))
    assert [
        (each.tuned["setting"], each.criterion, each.single and each.single["setting"])
        for each in found
    ] == [
        ("for 35", "psnr_median", "few"),  # 40 dB both
        ("for 35", "psnr_min", "some"),
        ("for 45", "psnr_median", None),
        ("for 45", "psnr_min", None),
    ]
    assert {each.closest["setting"] for each in found} == {"many"}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    tiny_wan_pipeline().save_pretrained(folder)
    (folder / "chipsparse.yaml").write_text(PROFILE)
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\na blue square\na green triangle\n")
    (tmp_path / "sparser.yaml").write_text(SPARSER)
    return folder


def test_profiles_are_measured_on_the_prompts_that_are_asked_for(model, capsys):
    file = model.parent / "tuned.json"
    arguments = ["--op", "tuned", "--device", "cpu", "--json", str(file), "--model", str(model)]
    arguments += ["--prompts", str(model.parent / "prompts.txt"), "--first", "1", "--count", "1"]
    arguments += [
        "--tuned",
        str(model.parent / "sparser.yaml"),
        "--case",
        "tuned|30% and 50%, difference, 1",
    ]
    assert main(arguments) == 0
    found = json.loads(file.read_text())
    assert {(each["seed"], each["prompt"]) for each in found} == {(1, "a blue square")}
    assert {each["op"] for each in found} == {"tuned"}
    names = {(each["method"], each["setting"]): each for each in found}
    assert set(names) == {
        ("dense", "first"),
        ("tuned", "sparser"),
        ("one budget", "30% and 50%, difference, 1 skipped in a row"),
    }
    sparser = names["tuned", "sparser"]
    single = names["one budget", "30% and 50%, difference, 1 skipped in a row"]
    assert sparser["attention_kept"] < single["attention_kept"]
    assert 5 < sparser["psnr"] < 100
    assert f"| {model.name} | tuned | sparser | 1 |" in capsys.readouterr().out
