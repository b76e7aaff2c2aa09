"""`chipsparse tune` from end to end, on a tiny model of random weights."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from chipsparse.cli.errors import UserError
from chipsparse.cli.plan import never_sparse
from chipsparse.cli.tune.lab import TIMED_ACTIONS
from chipsparse.cli.tune.record import TuningResult
from chipsparse.experiments.lpips import Lpips
from chipsparse.experiments.store import Store
from chipsparse.pipelines.families.flux import FLUX
from chipsparse.pipelines.registry import FAMILIES
from chipsparse.profiles.profile import load_profile
from chipsparse.profiles.tuned_range import TunedTarget
from chipsparse.tuning.forms import DENSITIES
from tests.cli.conftest import command, saved
from tests.cli.html_reader import PageReader
from tests.tiny_models import PROMPT, tiny_flux_pipeline, tiny_flux_transformer
from tests.variants import slow

PROFILE = """\
model_class: FluxTransformer2DModel
description: for tests
generation: {height: 64, width: 64, num_inference_steps: 6, max_sequence_length: 16}
sparsity:
  block_size: 16
  schedule: {periodic: {warmup: 2, refresh_every: 3}}
  tile: [1, 4, 4]
"""
PROMPTS = ["a red circle", "a blue square", "a green triangle", "a yellow circle"]
FEW = ("--calibration-prompts", "1", "--held-out-prompts", "2")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return saved(tiny_flux_pipeline(), tmp_path_factory.mktemp("models") / "tiny", PROFILE)


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


def clips(folder):
    return [record for record in kept(folder)["measured"].values() if "way" in record]


def trials(folder, config=None):
    """The records of candidates, or of one config."""
    records = [record for record in clips(folder) if record["way"] == "candidate"]
    return [record for record in records if config in (None, record["facts"]["config"])]


def test_the_profile_holds_its_target_and_generate_uses_it(measured, model_folder, workdir):
    folder, content, _ = measured
    profile = load_profile(folder / "p.yaml")
    written = yaml.safe_load((folder / "p.yaml").read_text())
    assert written.keys() == {"model_class", "description", "generation", "sparsity", "tuned"}
    # The file holds what a search chooses, be it a default.
    assert "density" in written["sparsity"]["attention"]
    assert profile.tuned.target.min_psnr_db == 25
    reached = profile.tuned.measured
    assert reached.prompts == 2
    assert reached.psnr_db_worst is None or reached.psnr_db_worst >= 25
    chosen = content["chosen"]
    assert chosen["measured"] == vars(reached)
    # The seed of a prompt is its number, so that anybody can repeat what was verified.
    given = ["--model", str(model_folder), "--config", str(folder / "p.yaml"), "--seed", "1"]
    result = command("generate", PROMPTS[1], "-o", "o.png", "--compare", "--json", *given).fine()
    made = json.loads(result.stdout)
    (trial,) = (trial for trial in trials(folder, chosen["config"]) if trial["seed"] == 1)
    assert made["comparison"]["psnr_db"] == pytest.approx(trial["psnr_db"], abs=1e-6)
    assert made["request"]["out_of_range"] == []
    assert "warning" not in result.stderr


def test_the_results_file_keeps_what_was_tried_and_chosen(measured):
    folder, content, stderr = measured
    results = kept(folder)
    chosen = content["chosen"]
    timed = [value for name, value in results["measured"].items() if name.startswith("times, ")]
    for seconds in timed:  # medians of some of the steps
        assert seconds["seconds"] > seconds["refresh"] + 2 * seconds["sparse"] + seconds["skip"] > 0
    # Sparse MLPs are tried although the profile has dense ones.
    assert "times, 0.1 of the columns, sparse MLPs" in results["measured"]
    note = {"target": {"min_psnr_db": 25}, "held_out": PROMPTS[1:3], "chosen": chosen}
    assert results["notes"] == {"min_psnr_db 25": note}
    tried = [trial["facts"]["config"] for trial in trials(folder)]
    assert content["configs_tried"] == len(set(tried))
    assert set(PROMPTS[1:3]) <= {trial["prompt"] for trial in trials(folder, chosen["config"])}
    full = [n for n, action in enumerate(chosen["actions"]) if action in ("dense", "refresh")]
    assert full == content["sparsity"]["schedule"]["listed"]["full"]
    first, *lines = stderr.splitlines()
    most = "the search takes at most the time of 30 dense generations (--budget)"
    assert first == f"{most}, 3 of them dense"
    step = next(place for place, line in enumerate(lines) if ": step " in line)
    assert re.match(r"prompt 1 of 3, dense: step .* s elapsed, about .* left$", lines[step])
    budget = r"a dense generation takes .*: the search ends within 30 times that"
    assert re.match(budget, lines[step + 1])


def test_the_page_of_a_results_file(measured, workdir):
    folder, content, _ = measured
    results = kept(folder)
    best = content["chosen"]["measured"]
    command("report", folder / "p.tune.json", "-o", "t.html").fine()
    reader = PageReader((workdir / "t.html").read_text())
    assert (reader.problems, reader.external()) == ([], [])
    head = reader.sections["Tuning of tiny"]
    assert f"{best['psnr_db_worst']:.2f} dB" in head
    assert f"{best['dense_seconds'] / best['seconds']:.2f}" in head
    assert "PSNR, worst of 2 held-out prompts" in head
    assert "target: a PSNR of at least 25 dB" in head
    assert "step 0: dense" in reader.sections["Chosen schedule, for a PSNR of at least 25 dB"]
    assert "target 25" in reader.sections["Quality and speed"]
    candidates = reader.sections["Candidates"]
    assert f"{content['chosen']['form']} (chosen)" in candidates
    assert f"{PROMPTS[1]}, held out" in candidates
    assert f"{PROMPTS[0]}, held out" not in candidates
    # The points of a chart over several files: whole generations, at the worst prompt.
    dense = {x["prompt"]: x["total_seconds"] for x in clips(folder) if x["way"] == "dense"}
    own = trials(folder, content["chosen"]["config"])
    speeds = [dense[trial["prompt"]] / trial["total_seconds"] for trial in own]
    point = TuningResult.model_validate(results).points("f")[0]
    assert point.psnr_db == min(trial["psnr_db"] for trial in own)
    assert point.speedup == pytest.approx(statistics.median(speeds))
    # What was broken off before anything was chosen says how to go on.
    Path("p.tune.json").write_text(json.dumps({**results, "measured": {}, "notes": {}}))
    command("report", "p.tune.json", "-o", "t.html").fine()
    missing = PageReader((workdir / "t.html").read_text()).sections["Not on this page"]
    assert missing.count("Run the same tune command again") == 3


def test_generate_and_compare_warn_outside_the_range(measured, model_folder, workdir):
    pipe = tiny_flux_pipeline(transformer=tiny_flux_transformer(num_single_layers=4))
    saved(pipe, workdir / "deeper", PROFILE)
    given = ("--model", "deeper", "--config", measured[0] / "p.yaml", "--dtype", "bfloat16")
    result = command("generate", PROMPT, "-o", "o.png", *given, "--flow-shift", "6").fine()
    (warning,) = [line for line in result.stderr.splitlines() if "warning:" in line]
    changes = "another model than tiny; a flow shift of 6.0, not the scheduler's own; bfloat16"
    assert f"({changes}, not float32): its quality and speed were not measured here" in warning
    profile = str(measured[0] / "p.yaml")
    note = f"{profile} was tuned for other generations than this one (5 steps, not 6): its quality"
    given = ("--model", str(model_folder), "--count", "2", "--steps", "5", "--json")
    result = command("compare", "dense", profile, *given)
    assert result.json()["rows"][1]["remarks"][0].startswith(note)
    assert f"chipsparse: warning: {note}" in result.stderr


def test_the_same_target_again_measures_nothing(again, loads_nothing):
    before = Path("p.tune.json").read_bytes()
    Path("p.yaml").unlink()
    result = again("--min-psnr", "25").fine()
    assert Path("p.tune.json").read_bytes() == before
    assert load_profile("p.yaml").tuned.target.min_psnr_db == 25
    assert "times as fast" in result.stdout


def test_targets_of_ssim_lpips_and_time(again, monkeypatch):
    def distance(a, b):
        assert a.shape == b.shape == (1, 64, 64, 3)
        return float((a - b).abs().mean())

    monkeypatch.setattr("chipsparse.cli.tune.job.find_lpips", lambda *_: Lpips(distance, None))
    given = ("--min-ssim", "0.9", "--max-lpips", "0.01", "--max-seconds", "60")
    result = again(*given).fine()
    tuned = load_profile("p.yaml").tuned
    assert tuned.target == TunedTarget(min_ssim=0.9, max_lpips=0.01, max_seconds=60)
    assert tuned.measured.ssim_worst >= 0.9
    assert 0 <= tuned.measured.lpips_worst <= 0.01
    assert tuned.measured.seconds <= 60
    assert "; SSIM 0.9" in result.stdout
    assert "; LPIPS 0.0" in result.stdout


def test_a_results_file_of_other_weights_is_refused(again, model_folder, tmp_path):
    other = shutil.copytree(model_folder, tmp_path / "other" / "tiny")
    (file,) = (other / "transformer").glob("*.safetensors")
    weights = bytearray(file.read_bytes())
    weights[8 + int.from_bytes(weights[:8], "little")] ^= 1  # of the first tensor
    file.write_bytes(weights)
    before = Path("p.tune.json").read_bytes()
    error = again("--min-psnr", "25", model=other).sentence()
    assert error.startswith("p.tune.json was measured with weights ")
    assert Path("p.tune.json").read_bytes() == before


# In the first dense generation, and in the verification.
@pytest.mark.parametrize("at", ["dense", slow("dense, 2-")])
def test_an_interrupted_run_goes_on_where_it_was(tune, monkeypatch, at):
    keep = Store.keep
    stop = [at]
    made = []

    def interrupted(store, name, make):
        if name not in store.measured:
            if stop and name.startswith(stop[0]):
                raise KeyboardInterrupt
            made.append(name)
        return keep(store, name, make)

    monkeypatch.setattr(Store, "keep", interrupted)
    result = tune("--min-psnr", "25")
    assert result.exit_code == 130
    words = "interrupted, what was measured is in p.tune.json: run it again"
    assert result.stderr.splitlines()[-1] == f"chipsparse: {words}"
    assert not Path("p.yaml").exists()
    assert set(kept()["measured"]) == set(made)
    stop.clear()
    tune("--min-psnr", "25").fine()
    assert len(made) == len(set(made))  # nothing was measured twice
    assert load_profile("p.yaml").tuned is not None


def test_a_target_that_cannot_be_met_tells_the_closest(again):
    before = Path("p.yaml").read_bytes()
    error = again("--min-speedup", "1000", "--budget", "1000").sentence()
    start = "at least 1000 times the speed cannot be met here: the closest on the held-out prompts "
    assert error.startswith(start)
    assert error.endswith(" times as fast; ask for less: what was measured is kept")
    assert Path("p.yaml").read_bytes() == before
    assert [note["chosen"] is None for note in kept()["notes"].values()] == [False, True]


def test_steps_that_do_not_call_the_transformer_are_not_searched(tune, monkeypatch):
    """MiniMax-H3 has one such step: its scheduler counts the end."""
    asked = []

    def search(lab, _, steps, *__, **___):
        asked.append(steps)
        return SimpleNamespace(run=lambda: lab._timed(0.1))

    def timed(pipe, arguments, **_):
        asked.append(arguments["num_inference_steps"])
        raise UserError("enough")

    timestep = replace(FLUX.timestep, uncalled_steps=1)
    monkeypatch.setitem(FAMILIES, FLUX.transformer_class, replace(FLUX, timestep=timestep))
    monkeypatch.setattr("chipsparse.cli.tune.job.Search", search)
    monkeypatch.setattr("chipsparse.cli.tune.lab.time_steps", timed)
    assert tune("--min-psnr", "30").sentence() == "enough"
    assert asked == [5, len(TIMED_ACTIONS) + 1]


@pytest.mark.parametrize("masked", [{}, {"mlp": "masked"}], ids=["can", "cannot"])
def test_sparse_mlps_are_timed_where_mlps_can_run_sparse(tune, monkeypatch, masked):
    asked = []

    def timed(_, density, *, sparse_mlp=False):
        asked.append((density, sparse_mlp))
        return {"sparse": 1.0, "refresh": 1.0, "skip": 0.0, "seconds": 1.0}

    def clip(*_):
        raise UserError("enough")

    sparse = replace(FLUX.sparse, masked=masked)
    monkeypatch.setitem(FAMILIES, FLUX.transformer_class, replace(FLUX, sparse=sparse))
    monkeypatch.setattr(
        "chipsparse.cli.tune.job.Search",
        lambda lab, *_, **__: SimpleNamespace(run=lab.step_seconds),
    )
    monkeypatch.setattr("chipsparse.cli.tune.lab.TuneLab._timed", timed)
    monkeypatch.setattr("chipsparse.cli.tune.lab.TuneLab._clip", clip)
    assert tune("--min-psnr", "30").sentence() == "enough"
    with_mlps = [] if masked else [(DENSITIES[0], True)]
    assert asked == [*((density, False) for density in DENSITIES), *with_mlps]


def test_parts_that_no_config_makes_sparse():
    def never(name, **config):
        return set(never_sparse(SimpleNamespace(transformer_class=name, transformer_config=config)))

    assert never("WanTransformer3DModel") == set()
    assert never("WanTransformer3DModel", quantization_config={"quant_method": "gguf"}) == {"mlp"}
    assert never("ChromaTransformer2DModel") == {"attention"}
