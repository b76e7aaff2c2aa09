"""`--lora`: what it takes, and what it refuses."""

import shutil

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from PIL import Image
from safetensors.torch import save_file

from chipsparse.cli.errors import UserError
from chipsparse.cli.model.lora import Lora, read_lora
from tests.cli.conftest import nothing_written

RANK = 2
SMALL = ("-o", "o.png", "--frames", "1", "--json")


def save_lora(path, model_folder, layer):
    """A LoRA of one linear of the first block, large enough to be seen."""
    transformer = WanPipeline.from_pretrained(model_folder).transformer
    linear = transformer.get_submodule(f"blocks.0.{layer}")
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(RANK, linear.in_features, generator=generator)
    b = torch.randn(linear.out_features, RANK, generator=generator)
    names = {"A": a, "B": b}
    save_file({f"transformer.blocks.0.{layer}.lora_{n}.weight": w for n, w in names.items()}, path)
    return path


@pytest.fixture(scope="module")
def attention_lora(model_folder, tmp_path_factory):
    return save_lora(
        tmp_path_factory.mktemp("lora") / "style.safetensors", model_folder, "attn1.to_q"
    )


@pytest.fixture(scope="module")
def mlp_lora(model_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("lora") / "style.safetensors"
    return save_lora(path, model_folder, "ffn.net.2")


def picture():
    return np.asarray(Image.open("o.png"))


def test_it_changes_the_picture_by_its_scale(generate, attention_lora):
    pictures, made = {}, {}
    for scale in (None, 0, 1, 2):
        given = () if scale is None else ("--lora", f"{attention_lora}:{scale}")
        made[scale] = generate(*SMALL, *given).json()
        pictures[scale] = picture()
    assert (pictures[0] == pictures[None]).all()
    assert (pictures[1] != pictures[None]).any()
    assert (pictures[2] != pictures[1]).any()
    assert made[2]["loras"] == [{"file": str(attention_lora), "scale": 2.0}]
    assert made[2]["sparse"]["fallbacks"] == []


@pytest.mark.parametrize(
    ("name", "steps", "said"),
    [
        ("Wan2.2-Lightning-4steps-lora", 50, "made for 4 steps by its name, and 50 are"),
        ("flux_8-step_turbo", 4, "give --steps 8"),
        ("h3_4step_or_8step", 6, "made for 4 or 8 steps"),
        ("h3_4step_or_8step", 8, None),
        ("style_1000stepsize", 50, None),
        ("a_doorstep", 50, None),
        ("checkpoint-20000steps", 50, None),  # of its training
        ("style", 4, None),
    ],
)
def test_a_lora_that_is_made_for_other_steps_is_noticed(tmp_path, name, steps, said):
    warning = Lora(tmp_path / f"{name}.safetensors", 1.0).steps_warning(steps)
    assert (warning is None) is (said is None)
    assert said is None or said in warning


def test_the_notice_is_among_the_warnings(generate, attention_lora, tmp_path):
    named = shutil.copy(attention_lora, tmp_path / "tiny-8steps.safetensors")
    (warning,) = generate(*SMALL, "--lora", str(named)).json()["warnings"]
    assert "tiny-8steps.safetensors is made for 8 steps by its name, and 4 are" in warning


def test_a_folder_and_several(generate, attention_lora, mlp_lora):
    content = generate(
        *SMALL, "--lora", str(attention_lora.parent), "--lora", f"{mlp_lora}:0.5"
    ).json()
    assert content["loras"] == [
        {"file": str(attention_lora), "scale": 1.0},
        {"file": str(mlp_lora), "scale": 0.5},
    ]
    (fallback,) = content["sparse"]["fallbacks"]
    assert "MLP runs dense in 1 of 3 layers (first: layer 0)" in fallback


def test_the_summary_says_what_it_makes_dense(generate, mlp_lora):
    ran = generate("-o", "o.png", "--frames", "1", "--lora", str(mlp_lora))
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert f"LoRA {mlp_lora} at 1" in lines
    assert any(line.startswith("fallback MLP runs dense in 1 of 3 layers") for line in lines)


def test_one_of_another_model(generate, tmp_path, workdir):
    file = tmp_path / "other.safetensors"
    save_file({"transformer.single.9.lora_A.weight": torch.zeros(2, 4)}, file)
    with nothing_written(workdir):
        assert generate(*SMALL, "--lora", str(file)).sentence().startswith(f"--lora {file} ")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("no.safetensors", "--lora no.safetensors does not exist; name a file or folder"),
        ("l.safetensors:much", "'much' is no number; write PATH or PATH:SCALE"),
        ("l.safetensors:nan", "the scale must be a finite number"),
        ("l.txt", "--lora l.txt must end in .safetensors"),
        ("empty", r"--lora empty must hold one .safetensors file, or name it; it holds none"),
        ("two", "it holds a.safetensors, b.safetensors"),
        ("l.safetensors", "--lora l.safetensors cannot be read"),
        ("weights.safetensors", "holds no LoRA: none of its tensors is named so"),
    ],
)
def test_what_is_no_lora(workdir, text, sentence):
    for name in ("l.txt", "l.safetensors"):
        (workdir / name).write_text("x")
    for folder, files in (("empty", ()), ("two", ("a.safetensors", "b.safetensors"))):
        (workdir / folder).mkdir()
        for name in files:
            (workdir / folder / name).touch()
    save_file({"weight": torch.zeros(2)}, workdir / "weights.safetensors")
    with pytest.raises(UserError, match=sentence):
        read_lora(text)


def test_a_colon_in_the_name(workdir, attention_lora):
    (workdir / "a:1.safetensors").write_bytes(attention_lora.read_bytes())
    found = read_lora("a:1.safetensors")
    assert (found.file.name, found.scale) == ("a:1.safetensors", 1.0)
    assert read_lora("a:1.safetensors:-0.5").scale == -0.5


def test_without_peft(attention_lora, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'chipsparse\[lora\]'"):
        read_lora(str(attention_lora))
