"""A real Ray: the same files as without it, actors that are killed, a cluster, GPUs."""

import json
import time

import pytest
import torch

from chipsparse.cli.errors import UserError
from tests.cli.batch.deadly import DeadlyActor

ray = pytest.importorskip("ray")

from chipsparse.cli.batch import ray_actors  # noqa: E402 - imports ray


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def deadly(batch, workdir, monkeypatch):
    """Runs the command with deadly actors, and gives what became of each prompt."""
    monkeypatch.setattr(ray_actors, "_Actor", DeadlyActor)

    def run(prompts, *arguments):
        (workdir / "p.txt").write_text("\n".join(prompts))
        ran = batch(*arguments, "--json", file="p.txt")
        assert (ran.exit_code, bool(ran.stdout)) == (1, True), ran.stderr
        return {clip["request"]["prompt"]: clip for clip in json.loads(ran.stdout)["clips"]}

    return run


@pytest.mark.slow
def test_actors_that_are_killed(deadly, workdir):
    once = f"kill unless {workdir / 'marker'}"
    prompts = ["fine 1", once, "kill", "break", *(f"fine {i}" for i in range(2, 5))]
    clips = deadly(prompts, "--gpus", "2")
    failed = {text: clip["error"] for text, clip in clips.items() if clip["state"] == "failed"}
    assert failed == {"kill": "its process ended", "break": "RuntimeError: CUDA error"}
    tries = {text: clips[text]["tries"] for text in ("fine 1", once, *failed)}
    assert tries == {"fine 1": 1, once: 2, "kill": 2, "break": 2}
    for text, clip in clips.items():
        file = workdir / "out" / clip["file"]
        assert (file.read_text() == f"{text}\n") if clip["state"] == "made" else not file.exists()
    # Another run tries what failed, and that alone.
    again = deadly(prompts, "--gpus", "2", "--tries", "1")
    states = {text: clip["state"] for text, clip in again.items()}
    assert states == {t: "failed" if t in failed else "already there" for t in prompts}
    assert again["kill"]["tries"] == 1


@pytest.mark.slow
def test_files_of_actors_are_those_of_one_process(batch, workdir):
    (workdir / "p.csv").write_text("prompt,frames\na circle,5\na square,9\n")

    def files(folder, *also):
        batch("--format", "gif", "-o", folder, *also, file="p.csv").fine()
        return {file.name: file.read_bytes() for file in (workdir / folder).glob("*.gif")}

    one = files("one")
    assert len(one) == 2
    assert files("two", "--gpus", "2") == one


@pytest.mark.slow
def test_a_cluster(batch, workdir, monkeypatch):
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        (workdir / "p.txt").write_text("a circle\n")
        small = ("--frames", "1", "--steps", "2", "--engine", "ray", "--json")
        assert batch(*small, file="p.txt").json()["counts"]["made"] == 1
        ray.init(cluster.address, logging_level="ERROR")
        freed = (time.sleep(0.1) or ray.available_resources().get("CPU") for _ in range(200))
        assert 4 in freed  # the actors let go of it
        ray.shutdown()
    finally:
        cluster.shutdown()


def test_what_ray_does_not_have(batch, workdir, monkeypatch):
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": gpus}} for gpus in (3.0, 1.0)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray_actors, "_connect", lambda: None)
    (workdir / "p.txt").write_text("a circle\n")
    for words, sentence in {
        "--device cuda:1": "--device cuda:1: Ray chooses the GPUs; use --device cuda",
        "--device cuda --gpus 5": "--gpus 5 is more than the 4 GPUs that Ray has",
    }.items():
        assert sentence in batch("--engine", "ray", *words.split(), file="p.txt").sentence()


def test_a_cluster_that_is_not_there(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    sentence = r"^the Ray cluster at 127\.0\.0\.1:1 cannot be used: Connection refused$"
    with pytest.raises(UserError, match=sentence):
        ray_actors._connect()


@pytest.mark.gpu
def test_on_gpus(batch, workdir):
    count = 4 * torch.cuda.device_count()
    (workdir / "p.txt").write_text("a circle moves left\n")
    size = ("--height", "128", "--width", "128", "--frames", "13", "--num", str(count))
    result = batch(*size, "--device", "cuda", "--engine", "ray", "--json", file="p.txt").json()
    assert result["counts"]["made"] == count
    assert {clip["request"]["dtype"] for clip in result["clips"]} == {"bfloat16"}
