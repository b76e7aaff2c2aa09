"""`chipsparse tune` from end to end, on a tiny model of random weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from chipsparse.cli.errors import UserError
from chipsparse.cli.tune import job
from chipsparse.cli.tune.lab import TIMED_ACTIONS
from chipsparse.cli.tune.record import TuningResult
from chipsparse.experiments.clips import StepResult
from chipsparse.experiments.lpips import Lpips
from chipsparse.experiments.store import Store
from chipsparse.profiles.profile import load_profile
from chipsparse.profiles.tuned_range import TunedTarget
from chipsparse.tuning.search import Unreachable
from chipsparse.tuning.targets import Pair
from tests.cli.conftest import change_index, command
from tests.cli.html_reader import PageReader
from tests.tiny_models import PROMPT, tiny_flux_pipeline, tiny_flux_transformer
from tests.variants import slow

PROFILE = """\
model_class: FluxTransformer2DModel
description: for tests
generation: {height: 64, width: 64, num_inference_steps: 6, max_sequence_length: 16}
sparsity:
  block_size: 16
  schedule: {warmup_steps: 2, refresh_every: 3}
  tile: [1, 4, 4]
"""
PROMPTS = ["a red circle", "a blue square", "a green triangle", "a yellow circle"]
FEW = ("--calibration-prompts", "1", "--held-out-prompts", "2")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(folder)
    (folder / "chipsparse.yaml").write_text(PROFILE)
    return folder


@pytest.fixture
def tune(model_folder, workdir):
    """Runs `chipsparse tune` in this process, in a folder with four prompts."""
    Path("prompts.txt").write_text("\n".join(["# shapes", "", *PROMPTS, PROMPTS[0]]) + "\n")

    def run(*arguments, model=model_folder, output="p.yaml"):
        given = ["tune", "--model", str(model), "--prompts", "prompts.txt", "-o", output]
        return command(*given, *FEW, *arguments)

    return run


@pytest.fixture(scope="module")
def measured(model_folder, tmp_path_factory):
    """A folder after one whole run, for other targets to start from."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    given = ["tune", "--model", str(model_folder), "--prompts", str(folder / "prompts.txt"), *FEW]
    result = command(*given, "--min-psnr", "25", "-o", str(folder / "p.yaml"), "--json").fine()
    return folder, json.loads(result.stdout), result.stderr


@pytest.fixture
def again(measured, tune):
    """The files of that run in the current folder, and the command."""
    shutil.copytree(measured[0], ".", dirs_exist_ok=True)
    return tune


def kept(folder=Path()):
    return json.loads((folder / "p.tune.json").read_text())


def test_the_profile_holds_its_target_and_generate_uses_it(measured, model_folder, workdir):
    folder, content, _ = measured
    profile = load_profile(folder / "p.yaml")
    written = yaml.safe_load((folder / "p.yaml").read_text())
    assert written.keys() == {"model_class", "description", "generation", "sparsity", "tuned"}
    # What a search chooses stands in the file, be it a default.
    assert "density" in written["sparsity"]["attention"]
    assert profile.tuned.target.min_psnr_db == 25
    reached = profile.tuned.measured
    assert reached.prompts == 2
    assert reached.psnr_db_worst is None or reached.psnr_db_worst >= 25
    assert content["tuned"]["measured"]["psnr_db_worst"] == reached.psnr_db_worst
    # The seed of a prompt is its number, so that anybody can repeat what was verified.
    given = ["--model", str(model_folder), "--config", str(folder / "p.yaml"), "--seed", "1"]
    result = command("generate", PROMPTS[1], "-o", "o.png", "--compare", "--json", *given).fine()
    made = json.loads(result.stdout)
    chosen = next(iter(kept(folder)["notes"].values()))["chosen"]["config"]
    (trial,) = (
        record
        for record in kept(folder)["measured"].values()
        if record.get("facts", {}).get("config") == chosen and record["seed"] == 1
    )
    assert made["comparison"]["psnr_db"] == pytest.approx(trial["psnr_db"], abs=1e-6)
    assert made["request"]["out_of_range"] == []
    assert "warning" not in result.stderr


def test_the_results_file_keeps_what_was_tried_and_chosen(measured):
    folder, content, stderr = measured
    results = kept(folder)
    records = [record for record in results["measured"].values() if "way" in record]
    timed = [times for name, times in results["measured"].items() if name.startswith("times, ")]
    for times in timed:  # medians of some of the steps
        assert times["seconds"] > times["refresh"] + 2 * times["sparse"] + times["skip"] > 0
    ((name, search),) = results["notes"].items()
    assert (name, search["target"]) == ("min_psnr_db 25", {"min_psnr_db": 25})
    assert search["held_out"] == PROMPTS[1:3]
    chosen = search["chosen"]
    trials = [record for record in records if record["way"] == "candidate"]
    assert content["configs_tried"] == len({trial["facts"]["config"] for trial in trials})
    verified = {t["prompt"] for t in trials if t["facts"]["config"] == chosen["config"]}
    assert set(search["held_out"]) <= verified
    assert chosen == content["chosen"]
    full = [step for step, each in enumerate(chosen["actions"]) if each in ("dense", "refresh")]
    assert full == content["sparsity"]["schedule"]["full_steps"]
    # What it says beforehand, and the one clock of the whole command.
    lines = stderr.splitlines()
    assert lines[0] == (
        "the search takes at most the time of 30 dense generations (--budget), 3 of them dense"
    )
    steps = [line for line in lines if ": step " in line]
    assert steps[0].startswith("prompt 1 of 3, dense: step ")
    budget = lines[lines.index(steps[0]) + 1]
    assert re.search(r"^a dense generation takes .*: the search ends within 30 times that", budget)
    clock = re.compile(r"\(\S+\), ((\d+) min )?([\d.]+) s elapsed, about .* left$")
    found = [clock.search(line) for line in steps]
    elapsed = [60 * int(each[2] or 0) + float(each[3]) for each in found]
    assert elapsed == sorted(elapsed)


def test_the_page_of_a_results_file(measured, workdir):
    folder, content, _ = measured
    command("report", folder / "p.tune.json", "-o", "t.html").fine()
    reader = PageReader((workdir / "t.html").read_text())
    assert (reader.problems, reader.external()) == ([], [])
    head = reader.sections["Tuning of tiny"]
    assert f"{content['tuned']['measured']['psnr_db_worst']:.2f} dB" in head
    assert "target: a PSNR of at least 25 dB" in head
    assert "step 0: dense" in reader.sections["Chosen schedule, for a PSNR of at least 25 dB"]
    assert "target 25" in reader.sections["Quality and speed"]
    assert f"{content['chosen']['form']} (chosen)" in reader.sections["Candidates"]
    # What was broken off before anything was chosen says how to go on.
    results = {**kept(folder), "measured": {}, "notes": {}}
    Path("p.tune.json").write_text(json.dumps(results))
    command("report", "p.tune.json", "-o", "t.html").fine()
    missing = PageReader((workdir / "t.html").read_text()).sections["Not on this page"]
    assert missing.count("Run the same tune command again") == 3


def test_the_headline_is_that_of_the_held_out_prompts():
    """The chosen config was tried on those that calibrate, too, and may be worse there."""

    def record(way, prompt, seconds, **values):
        return {"way": way, "prompt": prompt, "seed": 0, "total_seconds": seconds, **values}

    measured = {prompt: record("dense", prompt, 10.0) for prompt in "abc"}
    for prompt, psnr_db, seconds in (("a", 20.0, 9.0), ("b", 31.0, 5.0), ("c", 30.0, 5.0)):
        facts = {"config": "x", "form": "1 of 2 steps in full"}
        made = record("candidate", prompt, seconds, psnr_db=psnr_db, facts=facts)
        measured[f"candidate, {prompt}"] = made
    chosen = {"config": "x", "form": "1 of 2", "density": 0.2, "actions": ["dense", "skip"]}
    search = {"target": {"min_psnr_db": 30.0}, "held_out": ["b", "c"], "chosen": chosen}
    result = TuningResult(about={}, measured=measured, notes={"x": search})
    speed, psnr = result.sections()[0].parts[:2]
    assert speed.value.startswith("2.00")
    assert (psnr.value, psnr.label) == ("30.00 dB", "PSNR, worst of 2 held-out prompts")
    assert result.points("f")[0].psnr_db == 20.0


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (("--steps", "5"), "5 steps, not 6"),
        (("--dtype", "bfloat16"), "bfloat16, not float32"),
        (("--flow-shift", "6"), "a flow shift of 6.0, not the scheduler's own"),
        ((), "another model than tiny"),
    ],
)
def test_generate_warns_outside_the_range(measured, model_folder, workdir, change, phrase):
    if not change:
        pipe = tiny_flux_pipeline(transformer=tiny_flux_transformer(num_single_layers=4))
        model_folder = workdir / "deeper"
        pipe.save_pretrained(model_folder)
        (model_folder / "chipsparse.yaml").write_text(PROFILE)
    config = ("--config", str(measured[0] / "p.yaml"))
    given = ["generate", PROMPT, "-o", "o.png", "--model", str(model_folder), *config, *change]
    result = command(*given).fine()
    (warning,) = [line for line in result.stderr.splitlines() if "warning:" in line]
    assert f"({phrase})" in warning
    assert "its quality and speed were not measured here" in warning


def test_compare_says_what_is_outside_the_range(measured, model_folder, workdir):
    profile = str(measured[0] / "p.yaml")
    note = f"{profile} was tuned for other generations than this one (5 steps, not 6): its quality"
    given = ("--model", str(model_folder), "--count", "2", "--steps", "5", "--json")
    result = command("compare", "dense", profile, *given)
    assert result.json()["rows"][1]["remarks"][0].startswith(note)
    assert f"chipsparse: warning: {note}" in result.stderr


# Going on with a results file.


def test_the_same_target_again_measures_nothing(again, loads_nothing):
    before = Path("p.tune.json").read_bytes()
    Path("p.yaml").unlink()
    result = again("--min-psnr", "25").fine()
    assert Path("p.tune.json").read_bytes() == before
    assert load_profile("p.yaml").tuned.target.min_psnr_db == 25
    assert "times as fast" in result.stdout


@pytest.mark.slow
def test_another_target_measures_candidates_only(again):
    shutil.rmtree("p.tune-dense")  # dense clips that are needed are made again
    before = set(kept()["measured"])
    again("--min-psnr", "40", "--results", "p.tune.json", output="q.yaml").fine()
    new = set(kept()["measured"]) - before
    assert all(name.startswith("candidate, ") for name in new), new
    assert list(kept()["notes"]) == ["min_psnr_db 25", "min_psnr_db 40"]
    reached = load_profile("q.yaml").tuned.measured
    assert reached.psnr_db_worst is None or reached.psnr_db_worst >= 40


@pytest.mark.slow
def test_a_speed(again):
    """Times of so small a model are noise: the made-up ones of the file decide."""
    content = kept()
    for record in content["measured"].values():
        if record.get("way") == "dense":
            record |= {"total_seconds": 1e6, "seconds": 9e5}
            record["facts"]["step_seconds"] = 1.5e5
    Path("p.tune.json").write_text(json.dumps(content))
    again("--min-speedup", "1.5").fine()
    tuned = load_profile("p.yaml").tuned
    assert tuned.target.min_speedup == 1.5
    assert tuned.measured.dense_seconds >= 1.5 * tuned.measured.seconds
    schedule = load_profile("p.yaml").sparsity.schedule
    # All that may be in full, or more where some of them are sparse.
    sparse = schedule.between if isinstance(schedule.between, tuple) else ()
    assert len(schedule.full_steps) + len(sparse) >= 5


def test_targets_of_ssim_and_time(again):
    result = again("--min-ssim", "0.9", "--max-seconds", "60").fine()
    tuned = load_profile("p.yaml").tuned
    assert (tuned.target.min_ssim, tuned.target.max_seconds) == (0.9, 60)
    assert tuned.measured.ssim_worst >= 0.9
    assert tuned.measured.seconds <= 60
    assert "SSIM" in result.stdout


def test_a_limit_of_a_perceptual_distance(again, monkeypatch):
    def distance(a, b):
        assert a.shape == b.shape == (1, 64, 64, 3)
        return float((a - b).abs().mean())

    monkeypatch.setattr("chipsparse.cli.tune.job.find_lpips", lambda *_: Lpips(distance, None))
    result = again("--max-lpips", "0.01").fine()
    tuned = load_profile("p.yaml").tuned
    assert tuned.target.max_lpips == 0.01
    assert 0 <= tuned.measured.lpips_worst <= 0.01
    assert "LPIPS" in result.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--steps", "7"), "was measured with num_inference_steps 6, not 7"),
        (("--ram", "1G"), "was measured with memory.ram null, not 1073741824"),
        (("--flow-shift", "6"), "was measured with flow_shift null, not 6.0"),
        ("format", "is not a results file of this version: it is of kind None and format 2"),
        ("weights", "was measured with weights null, not "),
        ("bytes", "was measured with weights "),
    ],
)
def test_a_results_file_of_something_else_is_refused(
    again, model_folder, tmp_path, change, message
):
    options, content = () if isinstance(change, str) else change, kept()
    if change == "format":
        content = {"format": 2, "about": {}, "measured": {}}
    elif change == "weights":
        del content["about"]["weights"]
    elif change == "bytes":
        model_folder = shutil.copytree(model_folder, tmp_path / "other" / "tiny")
        (file,) = (model_folder / "transformer").glob("*.safetensors")
        weights = bytearray(file.read_bytes())
        weights[8 + int.from_bytes(weights[:8], "little")] ^= 1  # of the first tensor
        file.write_bytes(weights)
    Path("p.tune.json").write_text(json.dumps(content))
    before = Path("p.tune.json").read_bytes()
    error = again("--min-psnr", "25", *options, model=model_folder).sentence()
    assert error.startswith("p.tune.json ")
    assert message in error
    assert Path("p.tune.json").read_bytes() == before


# In the first dense generation, the times, a candidate, and the verification.
@pytest.mark.parametrize("at", ["dense", slow("times"), slow("candidate"), slow("dense, 2-")])
def test_an_interrupted_run_goes_on_where_it_was(tune, monkeypatch, at):
    keep, stop, new = Store.keep, [at], []

    def interrupted(store, name, make):
        if name not in store.measured:
            if stop and name.startswith(stop[0]):
                raise KeyboardInterrupt
            new.append(name)
        return keep(store, name, make)

    monkeypatch.setattr(Store, "keep", interrupted)
    result = tune("--min-psnr", "25")
    assert result.exit_code == 130
    told = "what was measured is in p.tune.json: run it again"
    assert result.stderr.splitlines()[-1] == f"chipsparse: interrupted, {told}"
    assert not Path("p.yaml").exists()
    assert set(kept()["measured"]) == set(new)
    first = [*new]
    stop.clear(), new.clear()
    tune("--min-psnr", "25").fine()
    assert not set(first) & set(new)
    assert load_profile("p.yaml").tuned is not None


# Targets that cannot be met.


def test_a_target_that_cannot_be_met_tells_the_closest(again):
    before = Path("p.yaml").read_bytes()
    error = again("--min-speedup", "1000", "--budget", "1000").sentence()
    assert error.startswith("at least 1000 times the speed cannot be met here: the closest on the ")
    assert " steps in full" in error
    assert error.endswith(" times as fast as dense; ask for less: what was measured is kept")
    assert Path("p.yaml").read_bytes() == before
    assert [each["chosen"] is None for each in kept()["notes"].values()] == [False, True]


def test_the_closest_in_words():
    pairs = [Pair(31.27, 0.91239, None, 4.0, 10.0), Pair(60.0, 0.99, None, 4.0, 10.0)]
    best = SimpleNamespace(candidate=SimpleNamespace(describe="9 steps in full"), pairs=pairs)
    options = SimpleNamespace(target=TunedTarget(min_psnr_db=40.0), budget=30)
    assert job._unreachable_text(options, Unreachable(best, out_of_budget=True)) == (
        "a PSNR of at least 40 dB was not found within --budget 30: the closest on the held-out "
        "prompts (9 steps in full) has a PSNR of 31.27 dB and an SSIM of 0.9124 at worst and takes "
        "4.00 s, 2.50 times as fast as dense; ask for less, or give a larger --budget: what was "
        "measured is kept"
    )


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a target: one or more of --min-psnr, --min-ssim, --max-lpips, --min-speedup"),
        (("--min-speedup", "0.9"), "--min-speedup 0.9 must be above 1"),
        (("--min-ssim", "1"), "--min-ssim 1 must be below 1"),
        (("--min-psnr", "-3"), "--min-psnr -3.0 must be a number above 0"),
        (
            ("--min-psnr", "30", "--budget", "6"),
            "--budget 6 is too small: 1 prompts to calibrate with and 2 to verify on need "
            "at least 7",
        ),
        (("--min-psnr", "30", "--steps", "3"), "at least 4 denoising steps, got 3"),
        (("--min-psnr", "30", "-o", "p.json"), "--output p.json must end in .yaml"),
        (("--min-psnr", "30", "--results", "r.txt"), "--results r.txt must end in .json"),
        (
            ("--min-psnr", "30", "--held-out-prompts", "5"),
            "prompts.txt has 4 different prompts, but 6 are needed: 1 to calibrate with and 5",
        ),
        (
            ("--max-lpips", "0.1"),
            "--max-lpips cannot be measured here: torchmetrics is not installed "
            "(pip install 'chipsparse[lpips]'); use --min-psnr",
        ),
    ],
)
def test_bad_input(tune, arguments, message, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchmetrics", None)
    assert message in tune(*arguments).sentence()
    assert {path.name for path in Path().iterdir()} == {"prompts.txt"}


def test_steps_that_do_not_call_the_transformer_are_not_searched(tune, monkeypatch):
    """As of MiniMax-H3, whose scheduler counts the end."""
    asked = []

    class Searching:
        def __init__(self, lab, *given, **_):
            asked.append(given[1])
            self.lab = lab

        def run(self):
            self.lab._timed(0.1, sparse_mlp=False)
            raise UserError("enough")

    def timed(pipe, arguments, **_):
        asked.append(arguments["num_inference_steps"])
        return [StepResult(n, kind, 1.0, None, None) for n, kind in enumerate(TIMED_ACTIONS)]

    monkeypatch.setattr("chipsparse.pipelines.flux.FluxAdapter.uncalled_steps", 1)
    monkeypatch.setattr("chipsparse.cli.tune.job.Search", Searching)
    monkeypatch.setattr("chipsparse.cli.tune.lab.time_steps", timed)
    assert tune("--min-psnr", "30").stderr.splitlines()[-1].endswith("enough")
    assert asked == [5, len(TIMED_ACTIONS) + 1]


def test_a_model_without_a_text_encoder(tune, model_folder, tmp_path):
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    change_index(folder, text_encoder=[None, None], text_encoder_2=[None, None])
    error = tune("--min-psnr", "30", model=folder).sentence()
    assert "has no text encoder, so FluxPipeline cannot" in error
