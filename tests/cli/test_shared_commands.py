"""`compare` and `tune` on several processes: what they start, refuse and find."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from chipsparse.cli.errors import UserError
from chipsparse.cli.ranks import Rank
from chipsparse.cli.ranks import joined as joining
from chipsparse.cli.tune.shared_results import SharedResults
from chipsparse.profiles.profile import load_profile
from chipsparse.tuning.results_file import ResultsError, ResultsFile
from tests.cli.conftest import IMAGE_PROFILE, command, names, nothing_written
from tests.ranks import run_ranks

LARGE = ("--height", "128", "--width", "128")
TARGET = ("--min-psnr", "25", "-o", "p.yaml")
BLOCKS = "sparsity:\n  attention: {block_size_q: 16}\n  mlp: {block_size: 16}"
PROMPTS = ["a red circle", "a blue square", "a green triangle", "a yellow circle"]


@pytest.fixture
def small(flux_folder, workdir):
    """Words that name a model of images with small blocks, its profile and four prompts."""
    (workdir / "small.yaml").write_text(IMAGE_PROFILE.replace("sparsity:", BLOCKS))
    (workdir / "prompts.txt").write_text("\n".join(PROMPTS))
    return ("--model", str(flux_folder), "--device", "cpu", *LARGE, "--steps", "6", "--json")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("compare", ("dense", "small.yaml")),
        ("tune", (*TARGET, "--config", "small.yaml")),
    ],
)
def test_the_processes_are_started_with_what_was_typed(small, monkeypatch, name, arguments):
    started = []
    monkeypatch.setattr("chipsparse.cli.ranks.launch", lambda *given: started.append(given))
    ran = command(name, *arguments, *small, "--gpus", 2)
    assert (ran.exit_code, ran.stdout) == (0, ""), ran.stderr
    ((words, count),) = started
    assert count == 2
    assert words[:2] == [name, "--json"]
    for word in (*LARGE, "small.yaml", *(["p.yaml"] if name == "tune" else [])):
        assert word in words
    if name == "compare":
        assert words[2:4] == ["dense", "small.yaml"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tune", *TARGET, "--gpus", 3), "this model has 2 attention heads, fewer than the 3"),
        (("compare", "dense", "profile", "--gpus", 3), "this model has 2 attention heads, fewer"),
        (
            ("compare", "dense", "profile", "--gpus", 2, "--guidance-parallel", 2),
            "--guidance-parallel 2: the pipelines of a FluxTransformer2DModel do not say before",
        ),
        (("tune", *TARGET, "--guidance-parallel", 2), "multiple of 2 GPUs, and there are to be 1"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(small, workdir, monkeypatch, words, said):
    monkeypatch.setattr("chipsparse.cli.ranks.launch", lambda *_: pytest.fail("started"))
    with nothing_written(workdir):
        ran = command(*words, *small)
    assert said in ran.sentence()
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--suite", "tiny", "--gpus", 2),
            "--suite compares methods that one GPU runs; leave --gpus",
        ),
        (("a.png", "b.png", "--gpus", 2), "--gpus is about generations; A and B are taken for"),
    ],
)
def test_comparisons_that_no_processes_share(workdir, words, said):
    (workdir / "tiny").mkdir()
    for file in ("a.png", "b.png"):
        (workdir / file).write_bytes(b"")
    assert said in command("compare", *words).sentence()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "--suite", "tiny"), "--suite runs on one GPU, and a launcher started 2"),
        (
            ("tune", *TARGET, "--gpus", 4),
            "--gpus 4, but torchrun started 2 processes; leave --gpus",
        ),
    ],
)
def test_under_torchrun(workdir, monkeypatch, words, said):
    (workdir / "tiny").mkdir()
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert said in command(*words).sentence()
    assert names(workdir) == ["tiny"]


def says(value):
    """A process beside the first one, which says this."""
    return Rank(1, 2, peers=SimpleNamespace(first=lambda _own: value))


def test_what_the_first_process_measured_counts(tmp_path):
    path = tmp_path / "results.json"
    first = SharedResults(path, {"steps": 4}, Rank())
    assert first.measured("a", lambda: {"seconds": 1.5}) == {"seconds": 1.5}
    assert ResultsFile(path, {"steps": 4}).get("a") == {"seconds": 1.5}
    before = path.read_text()
    other = SharedResults(path, {"steps": 4}, says([{"b": 2.0}, {}]))
    assert "a" not in other  # what the first one has
    assert other.measured("b", lambda: pytest.fail("made again")) == 2.0
    other._process = says(3.0)
    assert other.measured("c", lambda: 99.0) == other.get("c") == 3.0
    other.keep_search("psnr", {"chosen": None})
    assert path.read_text() == before
    with pytest.raises(ResultsError, match="steps 4, not 5"):
        SharedResults(path, {"steps": 5}, says([{}, {}]))


def test_the_first_process_makes_and_the_others_hear():
    assert Rank().first(lambda: 3) == 3
    assert says(5).first(lambda: pytest.fail("made")) == 5
    failed = []
    first = Rank(0, 2, peers=SimpleNamespace(failed=failed.append))
    with pytest.raises(OSError, match="disk is full"):
        first.first(lambda: (_ for _ in ()).throw(OSError("disk is full")))
    assert [str(error) for error in failed] == ["disk is full"]


def test_the_others_let_the_first_one_tell(monkeypatch):
    waited = []
    monkeypatch.setattr(joining.time, "sleep", waited.append)
    for process in (Rank(0, 2), Rank(1, 2)):
        with pytest.raises(UserError), process.after_first():
            raise UserError("no")
    assert waited == [joining.QUIET_SECONDS]


@pytest.mark.slow
def test_two_processes_find_what_one_does(small, workdir, tmp_path_factory):
    given = (*small, "--config", "small.yaml")
    compare = ["compare", "dense", "small.yaml", *small, "--prompts", "prompts.txt", "--num", "2"]
    alone = command(*compare, "-o", "alone.png").fine()
    few = ("--prompts", "prompts.txt", "--calibration-prompts", "1", "--held-out-prompts", "2")
    ended = run_ranks(
        2,
        "tests.cli.ranks:commands",
        str(workdir),
        ["generate", "a circle", *given, "-o", "no.png", "--seed", "RANK"],
        [*compare, "-o", "shared.png"],
        ["tune", *given, *few, *TARGET, "--budget", "12"],
        folder=tmp_path_factory.mktemp("ranks"),
    )
    first, other = (each.result for each in ended)
    for ran in (first.pop(0), other.pop(0)):
        assert (ran["exit"], ran["made"]) == (2, [])
        assert "rank 0 and rank 1 differ in seed: 0 and 1; every process" in " ".join(ran["stderr"])
    assert [ran["exit"] for ran in (*first, *other)] == [0] * 4, (first, other)
    assert [ran["stdout"] for ran in other] == [""] * 2
    compared, tuned = (json.loads(ran["stdout"]) for ran in first)
    # The results are those of one process, dense ones too.
    found = json.loads(alone.stdout)
    assert first[0]["made"] == ["shared.png"]
    assert (workdir / "shared.png").read_bytes() == (workdir / "alone.png").read_bytes()
    for own, together in zip(found["prompts"], compared["prompts"], strict=True):
        for side in ("A", "B"):
            for metric in ("psnr_db", "ssim"):
                assert own[side][metric] == together[side][metric]
    assert compared["parallel"] == {"ulysses": 2, "guidance": 1, "ring": 1}
    assert "both configs ran on the same GPUs" in " ".join(compared["notes"])
    assert {"p.yaml", "p.tune.json"} <= set(first[1]["made"])
    profile = load_profile(workdir / "p.yaml")
    assert (
        profile.tuned.measured.psnr_db_worst is None or profile.tuned.measured.psnr_db_worst >= 25
    )
    about = json.loads((workdir / "p.tune.json").read_text())["about"]
    assert (about["ulysses"], about["guidance"]) == (2, 1)
    assert tuned["configs_tried"] >= 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("command", ["compare", "tune"])
def test_on_two_gpus(small, workdir, command):
    own = {
        "compare": ("dense", "small.yaml", "--prompts", "prompts.txt", "--num", "2"),
        "tune": ("--prompts", "prompts.txt", *TARGET, "--held-out-prompts", "2", "--budget", "12"),
    }
    words = [command, *own[command], *small, "--device", "cuda", "--gpus", "2"]
    words += [] if command == "compare" else ["--config", "small.yaml"]
    ran = subprocess.run(
        [sys.executable, "-m", "chipsparse", *words], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    if command == "tune":
        assert (workdir / "p.yaml").is_file()
    else:
        assert found["parallel"] == {"ulysses": 2, "guidance": 1, "ring": 1}
    if command == "compare":
        assert all(
            each["B"]["psnr_db"] is None or each["B"]["psnr_db"] > 10 for each in found["prompts"]
        )
