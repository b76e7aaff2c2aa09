"""Several processes: which one this is, what is refused before any is started, what they make."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import imageio.v3 as iio
import numpy as np
import pytest
import torch
import typer

from chipsparse.cli.errors import UserError
from chipsparse.cli.generate.job import KeptPipeline
from chipsparse.cli.launching import start_others
from chipsparse.cli.options import GenerationOptions
from chipsparse.cli.ranks import Rank, meet, this_rank
from chipsparse.parallel.degrees import Parallel
from chipsparse.reasons.reason import fallback
from chipsparse.report.generation import GenerationReport
from tests.cli.conftest import IMAGE_PROFILE, command, names
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
LARGE = ("--height", "128", "--width", "128", "--frames", "13")
LAUNCHED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.fixture
def placed(monkeypatch):
    """The place of a process with these options, as a launcher has it or without one."""

    def place(gpus=None, guidance=None, **environment):
        for name in LAUNCHED:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return this_rank(gpus, guidance)

    return place


def test_which_process_this_is(placed):
    rank = placed(**LAUNCHED)
    alone = placed()
    assert (rank, rank.parallel, rank.writes) == (Rank(3, 4, 1), Parallel(ulysses=4), False)
    assert rank.device(CPU) == CPU
    assert placed(4, **LAUNCHED) == rank
    assert placed(None, 2, **LAUNCHED).parallel == Parallel(ulysses=2, guidance=2)
    assert alone == placed(1) == Rank()
    assert (alone.writes, alone.parallel, alone.device(CUDA)) == (True, None, CUDA)
    several = placed(2)
    assert (several.starts, several.writes, several.parallel) == (True, False, Parallel(ulysses=2))
    for (gpus, guidance, environment), said in {
        (None, None, "x"): "no numbers: RANK=x, WORLD_SIZE=4, LOCAL_RANK=1",
        (3, 2, None): "multiple of 2 GPUs, and there are to be 3",
        (2, None, "3"): "--gpus 2, but torchrun started 4 processes",
    }.items():
        with pytest.raises(UserError, match=said):
            placed(gpus, guidance, **({**LAUNCHED, "RANK": environment} if environment else {}))


def test_gpus_that_are_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank, device, said in (
        (Rank(ranks=4, starts=True), "cuda", "--gpus 4 is more than the 2 GPUs that this machine"),
        (Rank(ranks=2, starts=True), "cuda:1", "--device cuda:1 is one; use --device cuda"),
        (Rank(3, 4, 3), "cuda", "process 4 of this machine, which has 2 GPUs; start one"),
    ):
        with pytest.raises(UserError, match=said):
            rank.device(torch.device(device))
    assert Rank(ranks=2, starts=True).device(CUDA) == CUDA
    assert Rank(1, 2, 1).device(CUDA) == torch.device("cuda", 1)


def test_processes_that_cannot_meet(monkeypatch):
    for name, value in {"MASTER_ADDR": "localhost", "RANK": 0, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("MASTER_PORT", raising=False)
    threads = torch.get_num_threads()
    try:
        with pytest.raises(UserError, match=r"could not meet: .*MASTER_PORT expected"):
            meet(Rank(0, 2), CPU, {})
    finally:
        torch.set_num_threads(threads)
    assert meet(Rank(), CPU, {}) == Rank()


def test_the_first_process_makes_and_tells():
    other = Rank(1, 2, peers=SimpleNamespace(first=lambda _own: 5))
    assert Rank().first(lambda: 3) == 3
    assert other.first(lambda: pytest.fail("made")) == 5
    failed = []
    first = Rank(0, 2, peers=SimpleNamespace(failed=failed.append))
    with pytest.raises(OSError, match="disk is full"):
        first.first(lambda: (_ for _ in ()).throw(OSError("disk is full")))
    assert [str(error) for error in failed] == ["disk is full"]
    kept = KeptPipeline(Rank(1, 2, peers=SimpleNamespace(first=failed.append)))
    kept._held = SimpleNamespace(generation=0)
    kept._make = lambda *_: failed.append("made")
    kept.generate(None, "sparse")  # the first one may still compare and write
    assert failed[1:] == [None, "made"]


TARGET = ("--min-psnr", "25", "-o", "p.yaml")
BLOCKS = "sparsity:\n  block_size: 16"
PROMPTS = ["a red circle", "a blue square", "a green triangle", "a yellow circle"]


@pytest.fixture
def small(flux_folder, workdir):
    """Words that name a model of images with small blocks, its profile and four prompts."""
    (workdir / "small.yaml").write_text(IMAGE_PROFILE.replace("sparsity:", BLOCKS))
    (workdir / "prompts.txt").write_text("\n".join(PROMPTS))
    return ("--model", str(flux_folder), "--device", "cpu", *LARGE[:4], "--steps", "6", "--json")


@pytest.fixture
def started(monkeypatch):
    """The words with which processes are started, and how many; none of them is."""
    from torch.distributed import run

    calls = []

    def launch(config, entrypoint):
        return lambda *words: calls.append((list(words[3:]), config.nproc_per_node))

    monkeypatch.setattr(run, "elastic_launch", launch)
    return calls


def test_processes_are_started_with_what_was_typed(small, started, model_folder):
    wan = ("--model", str(model_folder), "--device", "cpu", "--json")
    for line, model in (
        (("generate", "a red circle", "-o", "o.gif", *LARGE), wan),
        (("compare", "dense", "small.yaml"), small),
        (("tune", *TARGET, "--config", "small.yaml"), small),
    ):
        ran = command(*line, *model, "--gpus", 2)
        assert (ran.exit_code, ran.stdout) == (0, ""), ran.stderr
        words, count = started.pop()
        assert (count, words[:2]) == (2, [line[0], "--json"])
        assert words[words.index("--gpus") + 1] == "2"
        typed = {*line[1:]} - {"-o", "25"}  # --output, and 25.0
        assert typed <= set(words)


def test_the_process_that_failed_first_is_named(monkeypatch, capsys):
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import errors

    def fails(config, entrypoint):
        folder = Path(config.logs_specs.root_log_dir) / "attempt_0" / "1"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text("a warning\nchipsparse: error: no room\nbye\n")
        failure = SimpleNamespace(exitcode=2, timestamp=1)

        def run(*_):
            error = errors.ChildFailedError.__new__(errors.ChildFailedError)
            error.failures = {1: failure}
            error.get_first_failure = lambda: (1, failure)
            raise error

        return run

    monkeypatch.setattr(run, "elastic_launch", fails)
    with pytest.raises(typer.Exit) as ended:
        start_others("generate", GenerationOptions(), 2)
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "chipsparse: error: rank 1: no room\n"


def test_the_first_process_reports_what_ran_dense_in_the_others():
    report = GenerationReport()
    report.add(fallback("layers.x", "one layer is dense"))
    gathered = [report.fallbacks, [*report.fallbacks, "another is"]]
    peers = SimpleNamespace(gather=lambda own: gathered)
    Rank(ranks=2, peers=peers).gather_fallbacks(report)
    first, other = report.fallbacks
    assert first == gathered[0][0]
    assert "another is" in other
    assert "rank 1" in other


@pytest.mark.slow
def test_two_processes_write_what_one_does(model_folder, tmp_path):
    def ran(name, *arguments):
        words = [sys.executable, "-m", "chipsparse", "generate", "a red circle", *arguments]
        words += ["--model", str(model_folder), *LARGE, "-o", f"{name}.gif"]
        words += ["--report", f"{name}.json", "--json", "--device", "cpu"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        options = {"capture_output": True, "text": True, "timeout": 600}
        done = subprocess.run(words, cwd=tmp_path, env=environment, check=False, **options)
        assert done.returncode == 0, done.stderr
        return iio.imread(tmp_path / f"{name}.gif"), json.loads(done.stdout)

    alone, _ = ran("alone")
    shared, result = ran("shared", "--gpus", "2")
    assert len(alone) == len(shared) == 13
    np.testing.assert_array_equal(alone, shared)
    assert "sparse" in {step["action"] for step in result["sparse"]["steps"]}
    assert result["files"]["output"] == ["shared.gif"]
    assert names(tmp_path) == ["alone.gif", "alone.json", "shared.gif", "shared.json"]


def commands(folder, *asked):
    """Return how each command ends on this rank; the word ``RANK`` stands for its number."""
    rank = torch.distributed.get_rank()
    ranks = torch.distributed.get_world_size()
    ends = []
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.chdir(folder)
    for words in asked:
        files = set(Path().rglob("*"))
        ran = command(*(rank if word == "RANK" else word for word in words))
        torch.distributed.barrier()
        made = sorted(map(str, set(Path().rglob("*")) - files))
        ends.append({**vars(ran), "made": made})
    return ends


@pytest.mark.slow
def test_two_processes_find_what_one_does(small, workdir, tmp_path_factory):
    given = (*small, "--config", "small.yaml")
    compare = ["compare", "dense", "small.yaml", *small, "--prompts", "prompts.txt", "--num", "2"]
    alone = command(*compare, "-o", "alone.png").fine()
    few = ("--prompts", "prompts.txt", "--calibration-prompts", "1", "--held-out-prompts", "2")
    generate = ["generate", "a circle", *given, "-o", "no.png", "--seed", "RANK"]
    tune = ["tune", *given, *few, *TARGET, "--budget", "12"]
    asked = (generate, [*compare, "-o", "shared.png"], tune)
    function = "tests.cli.test_ranks:commands"
    folder = tmp_path_factory.mktemp("ranks")
    ended = run_ranks(2, function, str(workdir), *asked, folder=folder)
    first, other = (rank.result for rank in ended)
    for ran in (first.pop(0), other.pop(0)):
        assert (ran["exit_code"], ran["made"]) == (2, [])
        assert "rank 0 and rank 1 differ in seed: 0 and 1; every process" in ran["stderr"]
    assert [ran["exit_code"] for ran in (*first, *other)] == [0] * 4, (first, other)
    assert [ran["stdout"] for ran in other] == [""] * 2
    compared = json.loads(first[0]["stdout"])
    # The results are those of one process, dense ones too.
    assert (workdir / "shared.png").read_bytes() == (workdir / "alone.png").read_bytes()
    metrics = ("way", "seed", "psnr_db", "ssim")
    shared, expected = (
        [clip[metric] for row in result["rows"] for clip in row["clips"] for metric in metrics]
        for result in (compared, json.loads(alone.stdout))
    )
    assert shared == pytest.approx(expected, abs=1e-4) != []  # a linear of fewer rows may round
    assert compared["sharing"].startswith("2, which share")
    assert {"p.yaml", "p.tune.json"} <= set(first[1]["made"])
