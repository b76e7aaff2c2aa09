"""`chipsparse tune` from end to end, on a tiny model of random weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from chipsparse.cli.errors import UserError
from chipsparse.cli.tune import lab as tune_lab
from chipsparse.cli.tune import unreachable
from chipsparse.cli.tune.lab import TIMED_ACTIONS
from chipsparse.cli.tune.names import pair_of
from chipsparse.common import finished_files
from chipsparse.experiments.clips import StepResult
from chipsparse.experiments.lpips import Lpips
from chipsparse.profiles.profile import load_profile
from chipsparse.tuning.results_file import ResultsFile
from tests.cli.conftest import change_index, command
from tests.tiny_models import PROMPT, tiny_flux_pipeline
from tests.variants import slow

PROFILE = """\
model_class: FluxTransformer2DModel
description: for tests
generation: {height: 64, width: 64, num_inference_steps: 6, max_sequence_length: 16}
sparsity:
  attention: {block_size_q: 16}
  mlp: {block_size: 16}
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
    (folder / "stderr.txt").write_text(result.stderr)
    return folder, json.loads(result.stdout)


@pytest.fixture
def again(measured, tune):
    """The files of that run in the current folder, and the command."""
    folder, _ = measured
    shutil.copytree(folder, ".", dirs_exist_ok=True)
    return tune


def test_the_profile_holds_its_target_and_generate_uses_it(measured, model_folder, workdir):
    folder, content = measured
    profile = load_profile(folder / "p.yaml")
    assert profile.tuned is not None
    # What a search chooses stands in the file, be it a default.
    assert "density" in yaml.safe_load((folder / "p.yaml").read_text())["sparsity"]["attention"]
    assert profile.tuned.target.min_psnr_db == 25
    found = profile.tuned.measured
    assert found.prompts == 2
    assert found.psnr_db_worst is None or found.psnr_db_worst >= 25
    assert found.seconds > 0
    assert found.dense_seconds > 0
    assert content["tuned"]["measured"]["psnr_db_worst"] == found.psnr_db_worst
    # The seed of a prompt is its number, so that anybody can repeat what was verified.
    given = ["--model", str(model_folder), "--config", str(folder / "p.yaml"), "--seed", "1"]
    result = command("generate", PROMPTS[1], "-o", "o.png", "--compare", "--json", *given).fine()
    made = json.loads(result.stdout)
    psnr = made["comparison"]["psnr_db"]
    results = json.loads((folder / "p.tune.json").read_text())["measured"]
    pairs = [each for name, each in results.items() if name.startswith("pair, ")]
    assert psnr in [pytest.approx(each["psnr_db"], abs=1e-6) for each in pairs]
    assert psnr >= found.psnr_db_worst - 0.01
    assert made["out_of_range"] == []
    assert "warning" not in result.stderr


def test_the_results_file_keeps_what_was_tried_and_chosen(measured):
    folder, content = measured
    results = json.loads((folder / "p.tune.json").read_text())
    timed = [each for name, each in results["measured"].items() if name.startswith("times, ")]
    assert timed
    for each in timed:  # medians of some of the steps
        assert each["seconds"] > each["refresh"] + 2 * each["sparse"] + each["skip"] > 0
    ((name, search),) = results["searches"].items()
    assert name == "min_psnr_db 25"
    assert search["target"] == {"min_psnr_db": 25}
    assert search["held_out"] == ["seed 1, a blue square", "seed 2, a green triangle"]
    chosen = search["chosen"]
    pairs = [found for each in results["measured"] if (found := pair_of(each)) is not None]
    assert content["configs_tried"] == len({config for config, _ in pairs})
    verified = {prompt for config, prompt in pairs if config == chosen["config"]}
    assert set(search["held_out"]) <= verified
    assert chosen["form"] == content["schedule"]
    assert chosen["actions"] == content["actions"]
    schedule = content["sparsity"]["schedule"]
    full = [step for step, each in enumerate(chosen["actions"]) if each in ("dense", "refresh")]
    assert full == schedule["full_steps"]
    assert schedule["between"] == "none" or "sparse" in chosen["actions"]


@pytest.mark.slow
def test_it_says_beforehand_how_long_it_takes(tune):
    result = tune("--min-psnr", "25", "--budget", "9").fine()
    lines = result.stderr.splitlines()
    assert lines[0] == (
        "the search takes at most the time of 9 dense generations (--budget), 3 of them dense"
    )
    (budget,) = [line for line in lines if line.startswith("a dense generation takes ")]
    assert re.search(r": the search ends within 9 times that, [\d.]+ (s|min)", budget)
    first = next(place for place, line in enumerate(lines) if ": step " in line)
    assert lines.index(budget) == first + 1


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (("--steps", "5"), "5 steps, not 6"),
        (("--height", "32"), "a height of 32 pixels, not 64"),
        (("--guidance-scale", "2"), "true guidance 2.0, not 1.0"),
        (("--dtype", "bfloat16"), "bfloat16, not float32"),
        (("--flow-shift", "6"), "a flow shift of 6.0, not the scheduler's own"),
    ],
)
def test_generate_warns_outside_the_range(measured, model_folder, workdir, change, phrase):
    folder, _ = measured
    config = ("--config", str(folder / "p.yaml"))
    given = ["generate", PROMPT, "-o", "o.png", "--model", str(model_folder), *config, *change]
    result = command(*given).fine()
    warnings = [line for line in result.stderr.splitlines() if "warning:" in line]
    assert len(warnings) == 1
    assert f"({phrase})" in warnings[0]
    assert "its quality and speed were not measured here" in warnings[0]


def test_explain_and_compare_say_what_is_outside_the_range(measured, model_folder, workdir):
    folder, _ = measured
    profile = str(folder / "p.yaml")
    (workdir / "two.txt").write_text("\n".join(PROMPTS[:2]))
    model = ("--model", str(model_folder), "--device", "cpu")
    note = f"{profile} was tuned for other generations than this one (5 steps, not 6): its quality"
    explain = ("explain", *model, "--config", profile, "--json", "--steps")
    explained = command(*explain, "5").json()
    assert explained["out_of_range"] == ["5 steps, not 6"]
    assert explained["notes"][0].startswith(note)
    explained = command(*explain, "6").json()
    assert explained["out_of_range"] == []
    assert "tuned for" not in " ".join(explained["notes"])
    given = ("--prompts", "two.txt", "--steps", "5", "--json")
    result = command("compare", "dense", profile, *model, *given)
    assert [each[:3] for each in result.json()["notes"] if note in each] == ["B: "]
    assert f"chipsparse: warning: {note}" in result.stderr


def test_explain_plans_for_a_device_that_is_not_here(measured, model_folder, workdir, monkeypatch):
    """Its name is not known, so it is not compared with the one of the profile."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    given = ["explain", "--config", str(measured[0] / "p.yaml"), "--model", str(model_folder)]
    assert command(*given, "--json").json()["out_of_range"] == ["bfloat16, not float32"]


def test_a_model_of_another_config_is_outside_the_range(measured, workdir, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "deeper"
    from tests.tiny_models import tiny_flux_transformer

    pipe = tiny_flux_pipeline(transformer=tiny_flux_transformer(num_single_layers=4))
    pipe.save_pretrained(other)
    (other / "chipsparse.yaml").write_text(PROFILE)
    config = ("--config", str(measured[0] / "p.yaml"))
    result = command("generate", PROMPT, "-o", "o.png", "--model", str(other), *config).fine()
    assert "(another model than tiny)" in result.stderr


def test_the_same_target_again_measures_nothing(again, monkeypatch):
    before = Path("p.tune.json").read_bytes()
    Path("p.yaml").unlink()
    monkeypatch.setattr(
        "chipsparse.cli.tune.job.load_pipeline", lambda *_, **__: pytest.fail("loaded a model")
    )
    result = again("--min-psnr", "25").fine()
    assert Path("p.tune.json").read_bytes() == before
    assert load_profile("p.yaml").tuned.target.min_psnr_db == 25
    assert "times as fast" in result.stdout


def test_times_of_another_memory_setting_are_refused(again):
    before = Path("p.tune.json").read_bytes()
    assert again("--min-psnr", "25", "--ram", "1G").sentence() == (
        "p.tune.json was measured with memory.ram null, not 1073741824; name another results file"
    )
    assert Path("p.tune.json").read_bytes() == before


@pytest.mark.slow
def test_another_target_measures_candidates_only(again):
    before = set(json.loads(Path("p.tune.json").read_text())["measured"])
    again("--min-psnr", "40", "--results", "p.tune.json", output="q.yaml").fine()
    new = set(json.loads(Path("p.tune.json").read_text())["measured"]) - before
    assert all(name.startswith("pair, ") for name in new), new
    searches = json.loads(Path("p.tune.json").read_text())["searches"]
    assert list(searches) == ["min_psnr_db 25", "min_psnr_db 40"]
    found = load_profile("q.yaml").tuned.measured
    assert found.psnr_db_worst is None or found.psnr_db_worst >= 40


@pytest.mark.slow
def test_a_speed(again):
    """Times of so small a model are noise: the made-up ones of the file decide."""
    content = json.loads(Path("p.tune.json").read_text())
    for name, each in content["measured"].items():
        if name.startswith("dense, "):
            each |= {"seconds": 1e6, "step_seconds": 1.5e5, "other_seconds": 1e5}
    Path("p.tune.json").write_text(json.dumps(content))
    again("--min-speedup", "1.5").fine()
    tuned = load_profile("p.yaml").tuned
    assert tuned.target.min_speedup == 1.5
    assert tuned.measured.dense_seconds >= 1.5 * tuned.measured.seconds
    assert tuned.measured.prompts == 2
    schedule = load_profile("p.yaml").sparsity.schedule
    # All that may be in full, or more where some of them are sparse.
    assert len(schedule.full_steps) + len(schedule.sparse_steps or ()) >= 5


def test_an_ssim(again):
    result = again("--min-ssim", "0.9").fine()
    tuned = load_profile("p.yaml").tuned
    assert tuned.target.min_ssim == 0.9
    assert tuned.measured.ssim_worst >= 0.9
    assert "SSIM" in result.stdout


def test_a_limit_of_time(again):
    again("--max-seconds", "60").fine()
    tuned = load_profile("p.yaml").tuned
    assert tuned.target.max_seconds == 60
    assert tuned.measured.seconds <= 60


def test_a_limit_of_a_perceptual_distance(again, monkeypatch):
    def distance(a, b):
        assert a.shape == b.shape == (1, 64, 64, 3)
        return float((a - b).abs().mean())

    monkeypatch.setattr(
        "chipsparse.cli.tune.job.find_lpips", lambda height, width: Lpips(distance, None)
    )
    result = again("--max-lpips", "0.01").fine()
    tuned = load_profile("p.yaml").tuned
    assert tuned.target.max_lpips == 0.01
    assert 0 <= tuned.measured.lpips_worst <= 0.01
    assert "LPIPS" in result.stdout


@pytest.mark.parametrize(
    ("target", "message"),
    [
        slow(("--min-psnr", "120"), "a PSNR of at least 120 dB cannot be met here"),
        (("--max-seconds", "1e-6"), "at most 1e-06 s cannot be met here"),
        (("--min-speedup", "1000"), "at least 1000 times the speed cannot be met here"),
    ],
)
def test_a_target_that_cannot_be_met_tells_the_best_and_the_command(
    again, target, message, monkeypatch
):
    before = Path("p.yaml").read_bytes()
    if target[0] == "--min-speedup":  # on a busy machine nothing may be faster than dense
        seconds = unreachable.median_seconds
        monkeypatch.setattr(
            unreachable, "median_seconds", lambda pairs: (seconds(pairs)[0], 2 * seconds(pairs)[0])
        )
    error = again(*target, "--budget", "1000").sentence()  # no end of its own on a busy machine
    assert message in error
    assert " steps in full" in error
    found = re.search(rf"run the same command with {target[0]} (\S+): what was measured", error)
    assert found, error
    reached = float(found[1])
    assert reached < 120 if target[0] == "--min-psnr" else reached > 0
    assert Path("p.yaml").read_bytes() == before
    searches = list(json.loads(Path("p.tune.json").read_text())["searches"].values())
    assert [each["chosen"] is None for each in searches] == [False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--steps", "7"), "was measured with num_inference_steps 6, not 7"),
        (("--height", "32"), "was measured with height 64, not 32"),
        (("--dtype", "bfloat16"), "was measured with dtype float32, not bfloat16"),
        (("--flow-shift", "6"), "was measured with flow_shift null, not 6.0"),
    ],
)
def test_a_results_file_of_something_else_is_refused(again, change, message):
    before = Path("p.tune.json").read_bytes()
    error = again("--min-psnr", "25", *change).sentence()
    assert message in error
    assert "name another results file" in error
    assert Path("p.tune.json").read_bytes() == before


def test_a_results_file_of_other_weights_is_refused(again, model_folder, tmp_path):
    other = shutil.copytree(model_folder, tmp_path / "other" / "tiny")
    (file,) = (other / "transformer").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # of the first tensor
    file.write_bytes(content)
    before = Path("p.tune.json").read_bytes()
    error = again("--min-psnr", "25", model=other).sentence()
    assert re.fullmatch(
        r"p\.tune\.json was measured with weights [0-9a-f]{12}, not [0-9a-f]{12}; name another "
        "results file",
        error,
    )
    assert Path("p.tune.json").read_bytes() == before


def test_a_results_file_of_weights_that_it_does_not_name_is_refused(again):
    content = json.loads(Path("p.tune.json").read_text())
    weights = content["about"].pop("weights")
    Path("p.tune.json").write_text(json.dumps(content))
    assert again("--min-psnr", "25").sentence() == (
        f"p.tune.json was measured with weights that it does not name, not {weights}; name another "
        "results file"
    )


def test_a_results_file_of_another_version_is_refused(again):
    content = json.loads(Path("p.tune.json").read_text())
    content["about"]["chipsparse"] = "0.0.1"
    Path("p.tune.json").write_text(json.dumps(content))
    error = again("--min-psnr", "25").sentence()
    assert "was measured with chipsparse 0.0.1, not" in error


class Interruption:
    """Presses Ctrl-C in the first measurement of a kind; ``names`` are those that were kept."""

    def __init__(self, monkeypatch, at):
        kept = ResultsFile.measured

        def measured(results, name, measure):
            if name not in results:
                if self.at is not None and name.startswith(self.at):
                    raise KeyboardInterrupt
                self.names.append(name)
            return kept(results, name, measure)

        self.at, self.names = at, []
        monkeypatch.setattr(ResultsFile, "measured", measured)


# In the first dense generation, the times, a candidate, and the verification.
@pytest.mark.parametrize(
    "at",
    ["dense", slow("times"), slow("pair"), slow("dense, seed 2")],
)
def test_an_interrupted_run_goes_on_where_it_was(tune, monkeypatch, at):
    stopped = Interruption(monkeypatch, at)
    result = tune("--min-psnr", "25")
    assert result.exit_code == 130
    kept = "what was measured is in p.tune.json: run it again"
    assert result.stderr.splitlines()[-1] == f"chipsparse: interrupted, {kept}"
    assert not Path("p.yaml").exists()
    assert set(json.loads(Path("p.tune.json").read_text())["measured"]) == set(stopped.names)
    first, stopped.at, stopped.names = stopped.names, None, []
    tune("--min-psnr", "25").fine()
    assert not set(first) & set(stopped.names)
    assert load_profile("p.yaml").tuned is not None


def test_measurements_that_cannot_be_kept_end_the_search(again, monkeypatch):
    before = Path("p.tune.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(finished_files, "write_checked", full)
    assert again("--min-psnr", "20").sentence() == (
        "the results file p.tune.json could not be written: No space left on "
        "device; what was measured before is in it"
    )
    assert Path("p.tune.json").read_bytes() == before


def test_dense_pictures_that_cannot_be_kept_end_the_search(again, monkeypatch):
    shutil.rmtree(tune_lab.dense_folder(Path("p.tune.json")))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.save", full)
    assert again("--min-psnr", "40").sentence() == (
        "the dense clips in p.tune-dense could not be written: No space left on device"
    )


def test_the_estimate_covers_everything_from_the_first_calibration_on(measured):
    """Off a terminal: each line of progress has one clock, for the whole command."""
    stderr = (measured[0] / "stderr.txt").read_text()
    lines = [line for line in stderr.splitlines() if ": step " in line]
    assert lines[0].startswith("dense, prompt 0: step ")
    form = re.compile(r"\(\S+\), ((\d+) min )?([\d.]+) s elapsed, about .* left$")
    found = [form.search(line) for line in lines]
    assert all(found), lines
    elapsed = [60 * int(each[2] or 0) + float(each[3]) for each in found]
    assert elapsed == sorted(elapsed)


@pytest.mark.slow
def test_lost_dense_pictures_are_made_again(again):
    shutil.rmtree(tune_lab.dense_folder(Path("p.tune.json")))
    again("--min-psnr", "40").fine()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (),
            "give a target: one or more of --min-psnr, --min-ssim, --max-lpips, --min-speedup, "
            "--max-seconds",
        ),
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
        (("--min-psnr", "30", "--prompts", "none.txt"), "--prompts none.txt could not be read"),
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


def test_the_profile_is_a_config_like_any_other(again):
    content = yaml.safe_load(Path("p.yaml").read_text())
    assert content.keys() == {"model_class", "description", "generation", "sparsity", "tuned"}
    content["sparsity"]["attention"]["keep"] = 1
    Path("p.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=r"sparsity\.attention\.keep: unknown field"):
        load_profile("p.yaml")


def test_steps_that_do_not_call_the_transformer_are_not_searched(tune, monkeypatch):
    """As of MiniMax-H3, whose scheduler counts the end."""
    asked = []

    class Searching:
        def __init__(self, lab, *given, **_):
            asked.append(given[1])
            self.lab = lab

        def run(self):
            self.lab._dense(0)
            self.lab._timed(0.1, sparse_mlp=False)
            raise UserError("enough")

    def timed(pipe, arguments, **_):
        asked.append(arguments["num_inference_steps"])
        steps = [StepResult(n, kind, 1.0, None, None) for n, kind in enumerate(TIMED_ACTIONS)]
        return steps, None

    monkeypatch.setattr("chipsparse.pipelines.flux.FluxAdapter.uncalled_steps", 1)
    monkeypatch.setattr("chipsparse.cli.tune.job.Search", Searching)
    monkeypatch.setattr("chipsparse.experiments.clips.time_steps", timed)
    assert tune("--min-psnr", "30").stderr.splitlines()[-1].endswith("enough")
    assert asked == [5, len(TIMED_ACTIONS) + 1]


def test_a_model_without_a_text_encoder(tune, model_folder, tmp_path):
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    change_index(folder, text_encoder=[None, None], text_encoder_2=[None, None])
    error = tune("--min-psnr", "30", model=folder).sentence()
    assert "has no text encoder, so FluxPipeline cannot" in error
