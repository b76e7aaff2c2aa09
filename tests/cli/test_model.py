"""A model's files: its weights, schedulers and LoRAs; and `chipsparse models`."""

import dataclasses
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline
from huggingface_hub import errors
from PIL import Image
from safetensors.torch import save_file

from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import describe_model
from chipsparse.cli.model.loading import load_pipeline
from chipsparse.cli.model.lora import Lora, read_lora
from chipsparse.cli.model.schedulers import choose_scheduler
from chipsparse.cli.model.weights import weights_digest
from chipsparse.cli.options import GenerationOptions
from chipsparse.pipelines import model_files
from chipsparse.pipelines.registry import FAMILIES
from tests.cli.conftest import change_json, command, nothing_written

# Of libraries, as older schedulers are tried with a newer NumPy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CONFIG = "transformer/config.json"
ONE = ("-o", "o.png", "--frames", "1", "--json")


def load(folder):
    model = describe_model(str(folder))
    return load_pipeline(model, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"num_layers": 4}, r"it asks for 27 tensors more than are there, such as blocks\.3\."),
        ({"ffn_dim": 96}, r"blocks\.0\.ffn.* expected shape torch\.Size\(\[96\]\), but got"),
    ],
)
def test_configs_of_another_model(broken_model, entries, sentence):
    change_json(broken_model / CONFIG, **entries)
    with pytest.raises(UserError, match=sentence):
        load(broken_model)


def test_downloads_that_broke_off(broken_model):
    (file,) = (broken_model / "text_encoder").glob("*.safetensors")
    whole = file.read_bytes()
    lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    for content in (*(whole[:keep] for keep in (0, 100, -1)), lfs):
        file.write_bytes(content)
        with pytest.raises(UserError, match=rf"{file} is damaged \(incomplete download\?\)"):
            load(broken_model)
    file.unlink()
    with pytest.raises(UserError, match=r"could not be loaded|text_encoder .* cannot be loaded"):
        load(broken_model)


def digest(folder):
    return weights_digest(describe_model(str(folder)))


def test_the_digest_of_a_folder(model_folder, broken_model):
    for file in broken_model.rglob("*"):
        os.utime(file, (0, 0))
    (broken_model / "chipsparse.yaml").unlink()  # whose settings count by themselves
    (broken_model / "README.md").write_text("tiny")
    (broken_model / "transformer/.DS_Store").write_text("seen")
    digests = [digest(broken_model)]
    assert digests == [digest(model_folder)]
    configs = ("model_index.json", "scheduler/scheduler_config.json", CONFIG)
    for name in (*configs, "tokenizer/tokenizer_config.json", "tokenizer/added.model"):
        with (broken_model / name).open("a") as file:
            file.write(" ")
        digests.append(digest(broken_model))
    assert len(set(digests)) == 6
    model = dataclasses.replace(describe_model(str(model_folder)), location="owner/tiny")
    assert weights_digest(model) is None  # a hub model is told by its name


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 5.0}


@pytest.fixture
def unipc_model(broken_model):
    """The tiny Wan with the scheduler that the published ones have."""
    UniPCMultistepScheduler(**FLOW).save_pretrained(broken_model / "scheduler")
    index = broken_model / "model_index.json"
    change_json(index, scheduler=["diffusers", "UniPCMultistepScheduler"])
    return broken_model


def choose(folder, name, *, sparse=True):
    options = GenerationOptions(scheduler=name)
    return choose_scheduler(describe_model(str(folder)), options, sparse=sparse)


def test_names_of_schedulers(unipc_model):
    for name in ("DPMSolverMultistepScheduler", "dpm-solver-multistep"):
        made = choose(unipc_model, name)
        assert type(made).__name__ == "DPMSolverMultistepScheduler"
        assert {key: made.config[key] for key in FLOW} == FLOW
    for name, sentence in {
        "nonsense": "--scheduler nonsense is none of diffusers' schedulers that take this model",
        "": "--scheduler is empty; leave it out for the model's own",
        "Heun": "--scheduler HeunDiscreteScheduler does not work here: ",
    }.items():
        with pytest.raises(UserError, match=f"^{sentence}"):
            choose(unipc_model, name)


def test_schedulers_that_call_the_model_twice_are_for_dense_runs(unipc_model):
    UniPCMultistepScheduler().save_pretrained(unipc_model / "scheduler")  # epsilon: Heun can
    assert choose(unipc_model, None) is None
    with pytest.raises(UserError, match="calls the transformer 2 times per denoising step"):
        choose(unipc_model, "HeunDiscrete")
    assert type(choose(unipc_model, "HeunDiscrete", sparse=False)).__name__.startswith("Heun")


def test_the_command_runs_with_another_scheduler(generate, unipc_model):
    made = generate(*ONE, "--scheduler", "deis", model=unipc_model).json()
    assert made["request"]["scheduler"] == "DEISMultistepScheduler"
    assert [step["action"] for step in made["sparse"]["steps"]].count("sparse") == 2


@pytest.fixture(scope="module")
def loras(model_folder, tmp_path_factory):
    """The file of one of attention, and of one of an MLP, large enough to be seen."""
    transformer = WanPipeline.from_pretrained(model_folder).transformer
    generator = torch.Generator().manual_seed(3)
    files = []
    for layer in ("attn1.to_q", "ffn.net.2"):
        linear = transformer.get_submodule(f"blocks.0.{layer}")
        name = f"transformer.blocks.0.{layer}.lora_{{}}.weight"
        tensors = {
            name.format("A"): torch.randn(2, linear.in_features, generator=generator),
            name.format("B"): torch.randn(linear.out_features, 2, generator=generator),
        }
        files.append(tmp_path_factory.mktemp("lora") / "style.safetensors")
        save_file(tensors, files[-1])
    return files


def test_a_lora_changes_the_image_by_its_scale(generate, loras):
    pictures = {}
    for scale in (None, 0, 1):
        given = () if scale is None else ("--lora", f"{loras[0]}:{scale}")
        made = generate(*ONE, *given).json()
        pictures[scale] = np.asarray(Image.open("o.png"))
    assert (pictures[0] == pictures[None]).all()
    assert (pictures[1] != pictures[None]).any()
    assert made["request"]["loras"] == [{"file": str(loras[0]), "scale": 1.0}]
    assert made["sparse"]["fallbacks"] == []


def test_a_folder_and_several_loras(generate, loras):
    given = ("--lora", str(loras[0].parent), "--lora", f"{loras[1]}:0.5")
    ran = generate(*ONE[:-1], *given).fine()
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert {f"LoRA {loras[0]} at 1", f"LoRA {loras[1]} at 0.5"} <= set(lines)
    assert any(line.startswith("fallback MLP runs dense in 1 of 3 layers") for line in lines)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("l.safetensors:much", "'much' is no number; write PATH or PATH:SCALE"),
        ("two", "it holds a.safetensors, b.safetensors"),
        ("l.safetensors", "--lora l.safetensors cannot be read"),
        ("weights.safetensors", "holds no LoRA: none of its tensors is named so"),
    ],
)
def test_what_is_no_lora(workdir, text, sentence):
    (workdir / "l.safetensors").write_text("x")
    (workdir / "two").mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (workdir / "two" / name).touch()
    save_file({"weight": torch.zeros(2)}, workdir / "weights.safetensors")
    with pytest.raises(UserError, match=sentence):
        read_lora(text)


@pytest.mark.parametrize("online", [True, False])
def test_a_lora_of_the_hub(loras, monkeypatch, online, workdir):
    asked = []

    def snapshot(name, *, allow_patterns, local_files_only):
        asked.append((name, allow_patterns, local_files_only))
        return str(loras[0].parent)

    monkeypatch.setattr("chipsparse.cli.model.lora.hub_answers", lambda: online)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    held = ["style.safetensors", "README.md"]
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda _: held)
    assert read_lora("owner/style:0.5") == Lora(loras[0], 0.5)
    assert asked == [("owner/style", "*.safetensors", not online)]
    held.append("more.safetensors")
    if online:  # of a whole model nothing is fetched
        with pytest.raises(UserError, match=r"it holds style\.safetensors, more\.safetensors"):
            read_lora("owner/style")
        assert len(asked) == 1
    with pytest.raises(UserError, match=r"--lora owner/style\.safetensors does not exist"):
        read_lora("owner/style.safetensors")
    (workdir / "owner").mkdir()
    with pytest.raises(UserError, match="--lora owner/style does not exist"):
        read_lora("owner/style")


def test_a_hub_name_that_cannot_be_fetched(monkeypatch):
    monkeypatch.setattr("chipsparse.cli.model.lora.hub_answers", lambda: False)
    sentence = (
        "--lora no-owner/style is not here and could not be fetched from the Hugging Face hub: "
    )
    with pytest.raises(UserError, match=sentence):
        read_lora("no-owner/style")


def test_names_of_loras_with_colons_and_a_missing_package(workdir, loras, monkeypatch):
    (workdir / "a:1.safetensors").write_bytes(loras[0].read_bytes())
    for text, scale in (("a:1.safetensors", 1.0), ("a:1.safetensors:-0.5", -0.5)):
        assert read_lora(text) == Lora(Path("a:1.safetensors"), scale)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'chipsparse\[lora\]'"):
        read_lora(str(loras[0]))


def test_a_lora_of_another_model(generate, tmp_path, workdir):
    file = tmp_path / "other.safetensors"
    save_file({"transformer.single.9.lora_A.weight": torch.zeros(2, 4)}, file)
    with nothing_written(workdir):
        assert generate(*ONE, "--lora", str(file)).sentence().startswith(f"--lora {file} ")


def test_every_family_is_listed_with_what_it_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = command("models").fine().stdout
    content = command("models", "--json").json()
    rows = {row["transformer_class"]: row for row in content["models"]}
    assert list(rows) == list(FAMILIES)
    assert max(map(len, page.splitlines())) <= 80
    words = " ".join(page.split())
    for name, family in FAMILIES.items():
        row = rows[name]
        dense = {part: f"dense: {x}" for part, x in family.sparse.masked.items()}
        told = {"attention": family.sparse.attention, "mlp": family.sparse.mlp, **dense}
        assert {"families": family.title, **told}.items() <= row.items()
        assert all(row[key] and row[key] in words for key in (*told, "text_columns", "guidance"))
    assert content["pipelines"] in words
    for name, line in content["other_classes"].items():
        assert f"{name} {line}" in words
    for name, column, text in (
        ("WanTransformer3DModel", "text_columns", "none in self-attention"),
        ("ChromaTransformer2DModel", "attention", "dense: the pipeline passes an attention mask"),
        ("FluxTransformer2DModel", "guidance", "true_cfg_scale: a second call per step"),
    ):
        assert rows[name][column] == text


class Session:
    """A client of the hub: one that answers, one that raises, or one that never answers."""

    def __init__(self, answers):
        self.answers = answers

    def head(self, *_, **__):
        if self.answers is None:
            threading.Event().wait(30)
        if not self.answers:
            raise OSError("no route to host")


@pytest.mark.parametrize("answers", [True, False, None])
def test_a_hub_that_does_not_answer_is_asked_once(answers, monkeypatch):
    looked_up = []

    def download(hub_name, name, *, local_files_only):
        looked_up.append(local_files_only)
        raise errors.LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr(model_files, "HUB_SECONDS", 0.2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: Session(answers))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    model_files.hub_answers.cache_clear()
    try:
        began = time.monotonic()
        with pytest.raises(UserError, match=r"a/model is neither .* no connection to it, and no"):
            describe_model("a/model")
        assert time.monotonic() - began < 10
        assert set(looked_up) == {not answers}
        assert model_files.from_cache("a/model") == ({} if answers else {"local_files_only": True})
    finally:
        model_files.hub_answers.cache_clear()
