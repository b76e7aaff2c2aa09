"""`generate --gpus`: what is refused before anything is loaded, and what the processes make."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from chipsparse.cli.command_line import settled_values
from chipsparse.cli.errors import UserError
from chipsparse.cli.ranks import Rank, check_gpus, joined, launched, meet
from chipsparse.cli.ranks import launch as launching
from chipsparse.parallel.degrees import Parallel
from tests.cli.conftest import names

ROOT = Path(__file__).parents[2]
LARGE = ("--height", "128", "--width", "128", "--frames", "13")
LAUNCHED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
CPU = torch.device("cpu")


def test_a_launcher_says_which_process_this_is():
    process = launched(LAUNCHED)
    assert process == Rank(3, 4, 1)
    assert process.parallel == Parallel(ulysses=4)
    assert not process.writes
    assert process.device(CPU) == CPU


def test_without_a_launcher_a_process_is_alone():
    alone = Rank()
    assert launched({}) is None
    assert alone.writes
    assert alone.parallel is None
    assert alone.device(torch.device("cuda")) == torch.device("cuda")


def test_variables_that_are_no_numbers():
    with pytest.raises(UserError, match="no numbers: RANK=x, WORLD_SIZE=4, LOCAL_RANK=1"):
        launched({**LAUNCHED, "RANK": "x"})


@pytest.mark.parametrize(("gpus", "starts"), [(None, False), (1, False), (2, True)])
def test_alone_several_gpus_are_to_be_started(gpus, starts, monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert (joined(gpus) is None) is starts


def test_under_torchrun_its_processes_count(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert joined(None) == joined(4) == Rank(3, 4, 1)
    assert joined(None, 2).parallel == Parallel(ulysses=2, guidance=2)
    with pytest.raises(UserError, match="--gpus 2, but torchrun started 4 processes"):
        joined(2)


def gpus(monkeypatch, *names, nccl=True, memory=None):
    """A machine with these GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    properties = [SimpleNamespace(total_memory=each) for each in memory or [140 << 30] * len(names)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)


def test_gpus_that_are_not_there_or_differ(monkeypatch):
    gpus(monkeypatch, "H200", "H200", "L4")
    check_gpus(2, "auto")
    for count, device, said in (
        (4, "cuda", "--gpus 4 is more than the 3 GPUs that this machine has"),
        (3, "cuda", r"several kinds, H200 \(140.00 GiB\) and L4 \(140.00 GiB\)"),
        (2, "cuda:1", "--device cuda:1 is one; use --device cuda"),
    ):
        with pytest.raises(UserError, match=said):
            check_gpus(count, device)
    gpus(monkeypatch, "H100", "H100", memory=[(80 << 30) - 5, 40 << 30])
    with pytest.raises(UserError, match=r"H100 \(40.00 GiB\) and H100 \(79.00 GiB\), which wait"):
        check_gpus(2, "cuda")
    gpus(monkeypatch, "H200", "H200", nccl=False)
    with pytest.raises(UserError, match="several GPUs need NCCL, which this build of PyTorch"):
        check_gpus(2, "cuda")
    # Those of a launcher, which did not ask.
    with pytest.raises(UserError, match="several GPUs need NCCL, which this build of PyTorch"):
        meet(Rank(0, 2), torch.device("cuda", 0))
    assert Rank(1, 2, 1).device(torch.device("cuda")) == torch.device("cuda", 1)
    with pytest.raises(UserError, match="process 4 of this machine, which has 2 GPUs; start one"):
        Rank(3, 4, 3).device(torch.device("cuda"))


def test_the_command_that_makes_it_again_is_not_refused(monkeypatch):
    """A process of several computes on one GPU, and the command names none of them."""
    gpus(monkeypatch, "H200", "H200")
    settings = SimpleNamespace(height=64, width=64, num_frames=5, num_inference_steps=4)
    first = torch.device("cuda", 0)
    check_gpus(2, str(settled_values(settings, first, torch.bfloat16, 2)["device"]))
    assert settled_values(settings, first, torch.bfloat16, None)["device"] == first


def test_processes_that_cannot_meet(monkeypatch):
    for name, value in {"MASTER_ADDR": "localhost", "RANK": 0, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("MASTER_PORT", raising=False)
    threads = torch.get_num_threads()
    try:
        with pytest.raises(UserError, match=r"could not meet: .*MASTER_PORT expected"):
            meet(Rank(0, 2), CPU)
        with socket.socket() as taken:
            taken.bind(("localhost", 0))
            taken.listen()
            monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
            with pytest.raises(UserError, match=r"could not meet: .*address already in use"):
                meet(Rank(0, 2), CPU)
    finally:
        torch.set_num_threads(threads)
    assert meet(Rank(), CPU) == Rank()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpus", "0"), "--gpus 0 is too small; it must be at least 1"),
        (("--gpus", "2"), "12 video or image tokens make 1 block of 128 rows, fewer than the 2"),
        (("--gpus", "3", *LARGE), "this model has 2 attention heads, fewer than the 3"),
        (
            ("--gpus", "3", "--guidance-parallel", "2"),
            "needs a multiple of 2 GPUs, and there are to",
        ),
        (("--guidance-parallel", "2"), "needs a multiple of 2 GPUs, and there are to be 1"),
        (("--gpus", "4", "--guidance-parallel", "4"), "--guidance-parallel 4 must be 1 or 2"),
        (("--gpus", "2", "--dense"), "several GPUs share the sparse run, which --dense leaves out"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    generate, workdir, monkeypatch, arguments, said
):
    monkeypatch.setattr("chipsparse.cli.ranks.launch", lambda *_: pytest.fail("started"))
    assert said in generate(*arguments, "--device", "cpu").sentence()
    assert list(workdir.iterdir()) == []


def test_the_processes_are_started_with_what_was_typed(generate, monkeypatch):
    started = []
    monkeypatch.setattr("chipsparse.cli.ranks.launch", lambda *given: started.append(given))
    generate("--gpus", "2", "--device", "cpu", "--json", *LARGE, prompt="a red circle").fine()
    ((words, count),) = started
    assert count == 2
    assert words[:3] == ["generate", "--json", "a red circle"]
    assert words[words.index("--gpus") + 1] == "2"
    assert words[words.index("--height") + 1] == "128"


def test_the_process_that_failed_first_is_named(monkeypatch, capsys):
    from torch.distributed.elastic.multiprocessing import errors
    from torch.distributed.launcher import api

    def fails(config, _program):
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

    monkeypatch.setattr(api, "elastic_launch", fails)
    with pytest.raises(launching.typer.Exit) as ended:
        launching.launch(["generate"], 2)
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == "chipsparse: error: rank 1: no room\n"


@pytest.mark.slow
def test_two_processes_write_what_one_does(model_folder, tmp_path):
    def ran(name, *arguments):
        command = [sys.executable, "-m", "chipsparse", "generate", "a red circle", *arguments]
        command += ["--model", str(model_folder), *LARGE]
        command += ["-o", f"{name}.gif", "--report", f"{name}.json", "--json"]
        done = subprocess.run(
            [*command, "--device", "cpu", "--guidance-scale", "1"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        frames = [np.asarray(frame) for frame in _frames(tmp_path / f"{name}.gif")]
        return frames, json.loads((tmp_path / f"{name}.json").read_text()), json.loads(done.stdout)

    alone, _, _ = ran("alone")
    shared, report, data = ran("shared", "--gpus", "2")
    assert len(alone) == len(shared) == 13
    assert all(map(np.array_equal, alone, shared))
    assert "sparse" in {step["action"] for step in report["steps"]}
    assert data["files"]["output"] == ["shared.gif"]
    assert names(tmp_path) == ["alone.gif", "alone.json", "shared.gif", "shared.json"]


def _frames(file):
    with Image.open(file) as image:
        for number in range(image.n_frames):
            image.seek(number)
            yield image.convert("RGB")
