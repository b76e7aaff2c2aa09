"""Real processes and a real Ray: workers that are killed, resuming, two commands on one folder."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

from chipsparse.cli.batch import job
from chipsparse.cli.batch.engine import Died, Failed, Unavailable
from chipsparse.cli.batch.processes import Processes
from chipsparse.cli.errors import UserError
from tests.cli.batch.conftest import InThisProcess
from tests.cli.batch.deadly_worker import DeadlyWorker
from tests.cli.conftest import command

ray = pytest.importorskip("ray")

from chipsparse.cli.batch.ray_actors import RayActors, answer_of  # noqa: E402 - imports ray


def processes():
    return Processes(["cpu", "cpu"], DeadlyWorker)


def ray_of_its_own():
    return RayActors("cpu", 2, DeadlyWorker)


def processes_of_two():
    return Processes(["cpu"], DeadlyWorker, per_worker=2)


def ray_of_two():
    return RayActors("cpu", 1, DeadlyWorker, per_worker=2)


@pytest.fixture(scope="module")
def cluster():
    """A cluster of one machine; gives its address."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    yield made.address
    made.shutdown()


@pytest.fixture
def run(model_folder, workdir, monkeypatch):
    """Runs the command with deadly workers, on the prompts that it is given."""

    def batch(prompts, make_engine, *arguments):
        (workdir / "p.txt").write_text("\n".join(prompts))
        monkeypatch.setattr(job, "_engine", lambda options, here: make_engine())
        given = ["batch", "p.txt", "-o", "out", "--device", "cpu", "--model", str(model_folder)]
        ran = command(*given, "--workers", "2", "--json", *arguments)
        return ran, json.loads(ran.stdout)

    return batch


def by_prompt(found):
    return {row["prompt"]: row for row in found["rows"]}


@pytest.mark.slow
@pytest.mark.parametrize("make_engine", [processes, ray_of_its_own])
def test_workers_that_are_killed(run, workdir, make_engine):
    once = f"kill unless {workdir / 'marker'}"
    prompts = ["fine 1", once, "kill", "exit", "refuse", *(f"fine {i}" for i in range(2, 6))]
    ran, found = run(prompts, make_engine, "--tries", "2")
    assert ran.exit_code == 1, ran.stderr
    rows = by_prompt(found)
    assert {text for text, row in rows.items() if row["state"] == "failed"} == {
        "kill",
        "exit",
        "refuse",
    }
    assert found["made"] == 6
    tries = {text: rows[text]["tries"] for text in ("fine 1", once, "kill", "exit", "refuse")}
    assert tries == {"fine 1": 1, once: 2, "kill": 2, "exit": 2, "refuse": 1}
    for text, row in rows.items():
        file = workdir / "out" / row["file"]
        assert (file.read_text() == f"{text}\n") if row["state"] == "made" else not file.exists()
    if make_engine is processes:
        assert rows["kill"]["error"] == "killed by SIGKILL"
        assert rows["exit"]["error"] == "ended with exit code 3"
    # Another run tries what failed, and that alone.
    os.rename(workdir / "out" / rows["fine 2"]["file"], workdir / "gone")
    again, second = run(prompts, make_engine, "--tries", "1")
    assert again.exit_code == 1
    assert (second["made"], second["already_there"], second["failed"]) == (1, 5, 3)
    assert by_prompt(second)["fine 2"]["state"] == "made"
    assert by_prompt(second)["kill"]["tries"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("make_engine", [processes_of_two, ray_of_two])
def test_a_worker_ends_as_a_whole_where_one_of_its_processes_does(run, workdir, make_engine):
    once = f"last kill unless {workdir / 'marker'}"
    ran, found = run(["fine", once, "last exit"], make_engine, "--workers", "1")
    assert ran.exit_code == 1, ran.stderr
    rows = by_prompt(found)
    assert {text: row["state"] for text, row in rows.items()} == {
        "fine": "made",
        once: "made",
        "last exit": "failed",
    }
    assert {text: row["tries"] for text, row in rows.items()} == {
        "fine": 1,
        once: 2,
        "last exit": 2,
    }
    assert rows["last exit"]["error"].startswith("process 2 of 2: ")


@pytest.mark.slow
def test_files_of_several_processes_are_those_of_one(model_folder, workdir, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (workdir / "p.csv").write_text("prompt,frames\na circle,5\na square,9\n")
    profile = (model_folder / "chipsparse.yaml").read_text()
    blocks = "sparsity:\n  attention: {block_size_q: 16}\n  mlp: {block_size: 16}"
    (workdir / "small.yaml").write_text(profile.replace("sparsity:", blocks))
    given = ["batch", "p.csv", "--device", "cpu", "--model", str(model_folder), "--json"]
    given += ["--config", "small.yaml", "--height", "64", "--width", "64", "--format", "gif"]

    def files(folder, *also):
        command(*given, "--workers", "1", "-o", folder, *also).fine()
        return {file.name: file.read_bytes() for file in (workdir / folder).glob("*.gif")}

    with monkeypatch.context() as here:
        here.setattr(job, "_engine", lambda options, _: InThisProcess(options.device))
        one = files("one")
    assert len(one) == 2
    for engine in ("accelerate", "ray"):
        assert files(engine, "--engine", engine, "--gpus-per-job", "2") == one
        (line, _) = (workdir / engine / "manifest.jsonl").read_text().splitlines()
        words = json.loads(line)["command"]
        assert words[words.index("--gpus") + 1] == "2"


@pytest.mark.slow
def test_two_commands_on_one_folder_of_a_cluster(model_folder, workdir, cluster):
    """Both connect to the cluster that runs already; each file is made by one of them."""
    prompts = [f"a circle moves {i}" for i in range(4)]
    (workdir / "p.txt").write_text("\n".join(prompts))
    given = ["p.txt", "-o", "out", "--device", "cpu", "--model", str(model_folder)]
    small = ["--frames", "1", "--steps", "2", "--workers", "1", "--engine", "ray", "--json"]
    start = functools.partial(
        subprocess.Popen,
        [sys.executable, "-m", "chipsparse", "batch", *given, *small],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "RAY_ADDRESS": cluster},
        text=True,
    )
    with start() as one, start() as other:
        ended = [each.communicate(timeout=300) for each in (one, other)]
    assert [one.returncode, other.returncode] == [0, 0], ended
    found = [json.loads(stdout) for stdout, _ in ended]
    states = [{by_prompt(each)[text]["state"] for each in found} for text in prompts]
    assert states == [{"made", "already there"}] * 4
    assert found[0]["made"] + found[1]["made"] == 4
    assert len(list((workdir / "out").glob("*.mp4"))) == 4
    lines = (workdir / "out/manifest.jsonl").read_text().splitlines()
    assert len(lines) == len({json.loads(line)["file"] for line in lines}) == 4
    # The workers of a finished command let go of the cluster.
    ray.init(cluster, logging_level="ERROR")
    try:
        assert ray.available_resources()["CPU"] == 4
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_processes_of_a_launcher_share_the_work(model_folder, workdir):
    prompts = [f"a circle moves {i}" for i in range(4)]
    (workdir / "p.txt").write_text("\n".join(prompts))
    given = ["p.txt", "-o", "out", "--device", "cpu", "--model", str(model_folder)]
    small = ["--frames", "1", "--steps", "2", "--json"]
    launch = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    settled = ["--mixed_precision", "no", "--dynamo_backend", "no"]
    ran = subprocess.run(
        [sys.executable, "-m", *launch, *settled, "-m", "chipsparse", "batch", *given, *small],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)  # of one of them alone
    assert found["made"] + found["already_there"] == 4
    assert found["failed"] == found["missing"] == 0
    lines = (workdir / "out/manifest.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["prompt"] for line in lines) == prompts


@pytest.mark.slow
def test_a_command_that_is_killed_leaves_no_worker(model_folder, workdir):
    (workdir / "p.txt").write_text("a circle\n")
    given = ["p.txt", "-o", "out", "--device", "cpu", "--model", str(model_folder)]
    command = [sys.executable, "-m", "chipsparse", "batch", *given, "--num", "500"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        for line in running.stderr:
            if "1 of 500" in line:
                break
        children = subprocess.run(
            ["ps", "--ppid", str(running.pid), "-o", "pid="], capture_output=True, text=True
        ).stdout.split()
        assert children
        running.kill()
    for child in children:
        while os.path.exists(f"/proc/{child}"):  # a worker looks after its parent at once
            os.sched_yield()
    assert len(list((workdir / "out").glob("*.mp4"))) >= 1


def test_a_cluster_that_is_not_there(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    sentence = r"^the Ray cluster at 127\.0\.0\.1:1 cannot be used: Connection refused$"
    with pytest.raises(UserError, match=sentence):
        RayActors("cpu", None, DeadlyWorker)


def test_what_ray_says_of_a_worker():
    exceptions = ray.exceptions
    assert answer_of(exceptions.ActorUnavailableError("gone for now", None)) == Unavailable()
    assert answer_of(exceptions.ActorDiedError()) == Died("its process ended")
    assert answer_of(exceptions.NodeDiedError("gone")) == Died("its machine is gone")
    memory = answer_of(exceptions.OutOfMemoryError("full"))
    assert memory == Died("ended by Ray: its machine ran out of memory")
    raised = exceptions.RayTaskError("make", "traceback", KeyError("x"))
    assert answer_of(raised) == Failed("'x'")


def test_processes_that_no_machine_of_ray_has_gpus_for(monkeypatch):
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": gpus}} for gpus in (3.0, 1.0)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 4.0})
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(RayActors, "_connect", lambda _: "")
    assert RayActors("cuda", None, DeadlyWorker, per_worker=2).most == 1
    assert RayActors("cuda", None, DeadlyWorker).most == 4
    sentence = "^--gpus-per-job 4 is more than the 3 GPUs that any machine of Ray has$"
    with pytest.raises(UserError, match=sentence):
        RayActors("cuda", None, DeadlyWorker, per_worker=4)


def test_ray_chooses_the_gpus():
    with pytest.raises(UserError, match=r"^--device cuda:1: Ray chooses the GPUs"):
        RayActors("cuda:1", None, DeadlyWorker)


@pytest.mark.gpu
@pytest.mark.parametrize("per_worker", [1, 2])
@pytest.mark.parametrize("engine", ["accelerate", "ray"])
def test_on_gpus(model_folder, workdir, engine, per_worker):
    """Workers on all GPUs of this machine; all of them make something."""
    count = torch.cuda.device_count() // per_worker
    if not count:
        pytest.skip(f"needs {per_worker} GPUs")
    (workdir / "p.txt").write_text("a circle moves left\n")
    given = ["p.txt", "-o", "out", "--model", str(model_folder), "--device", "cuda"]
    given += ["--height", "128", "--width", "128", "--frames", "13"]
    small = ["--num", str(8 * count), "--engine", engine, "--json"]
    small += ["--gpus-per-job", str(per_worker)]
    ran = subprocess.run(
        [sys.executable, "-m", "chipsparse", "batch", *given, *small],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["made"] == 8 * count
    lines = [json.loads(line) for line in (workdir / "out/manifest.jsonl").open()]
    assert {line["dtype"] for line in lines} == {"bfloat16"}
    if engine == "accelerate":
        assert len({line["worker"] for line in lines}) == count
