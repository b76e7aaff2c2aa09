"""`generate --from`: a recorded generation is repeated, and options replace what it says."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from PIL import Image
from safetensors.numpy import save_file

from chipsparse.cli.errors import UserError
from chipsparse.cli.generate.repeat import find_record, new_name
from chipsparse.cli.media.read import read_clip
from chipsparse.cli.options import GenerateOptions, _taken, words_values
from tests.cli.conftest import command, names, nothing_written

SMALL = ("--height", "32", "--width", "48", "--frames", "1", "--steps", "4")
QUALITIES = """
sparsity: {attention: {density: 0.5}}
qualities:
  faithful: {schedule: {listed: {full: [0, 1, 2]}}}
  balanced: {schedule: {listed: {full: [0, 1]}}}
  draft: {schedule: {listed: {full: [0, 1]}}}
"""


@pytest.fixture
def profile(workdir):
    (workdir / "mine.yaml").write_text(QUALITIES)
    return "--config", "mine.yaml"


@pytest.fixture
def draft(generate, profile):
    """A draft with many settings, its record beside it."""
    settings = ("--seed", "7", "--negative-prompt", "blue", "--guidance-scale", "2")
    draft = ("--quality", "draft", "-o", "d.png", "--report", "d.json")
    return generate(*SMALL, *profile, *settings, *draft, "--json").json()


def frames(name):
    return read_clip(Path(name)).frames


@pytest.fixture
def noises(monkeypatch):
    """The noise that each generation begins with."""
    made = []
    prepare = WanPipeline.prepare_latents

    def prepared(*given, **options):
        latents = prepare(*given, **options)
        made.append(latents.clone())
        return latents

    monkeypatch.setattr(WanPipeline, "prepare_latents", prepared)
    return made


def repeated(source, *options):
    return command("generate", "--from", source, *options, "--json")


@pytest.mark.parametrize("source", ["d.png", "d.json"])
def test_a_repetition_is_what_the_same_settings_give_bit_for_bit(draft, source):
    made = repeated(source).json()
    assert made["files"] == {"output": ["d-2.png"]}
    assert np.array_equal(frames("d-2.png"), frames("d.png"))
    # Files are recorded by paths that hold in every folder.
    named = {"command": made["request"]["command"], "profile": str(Path("mine.yaml").absolute())}
    assert made["request"] == {**draft["request"], **named}
    assert "--from" not in made["request"]["command"]
    assert repeated(source).json()["files"] == {"output": ["d-3.png"]}


def test_another_quality_keeps_seed_noise_and_settings(noises, draft, generate, profile):
    finished = repeated("d.png", "--quality", "faithful").json()
    assert len(noises) == 2
    assert torch.equal(*noises)
    changed = {"quality": "faithful", "command": finished["request"]["command"]}
    changed["profile"] = str(Path("mine.yaml").absolute())
    assert finished["request"] == {**draft["request"], **changed}
    settings = ("--seed", "7", "--negative-prompt", "blue", "--guidance-scale", "2")
    generate(*SMALL, *profile, *settings, "--quality", "faithful", "-o", "typed.png").fine()
    typed = frames("typed.png")
    assert np.array_equal(frames("d-2.png"), typed)
    assert not np.array_equal(frames("d.png"), typed)


def test_what_is_typed_replaces_the_record_also_where_it_is_the_default(draft, workdir):
    made = repeated("d.json", "--seed", "0", "--steps", "3", "-o", "e.gif", "--fps", "8").json()
    asked = made["request"]
    assert (asked["seed"], asked["settings"]["num_inference_steps"], asked["fps"]) == (0, 3, 8)
    assert made["files"] == {"output": ["e.gif"]}
    prompt = command("generate", "a square", "--from", "d.json", "--json").json()["request"]
    assert (prompt["prompt"], prompt["seed"]) == ("a square", 7)
    (workdir / "p.txt").write_text("a ball\n")
    series = repeated("d.json", "--prompts", "p.txt", "--num", "2").json()["clips"]
    assert [(clip["request"]["prompt"], clip["request"]["seed"]) for clip in series] == [
        ("a ball", 7),
        ("a ball", 8),
    ]
    ran = command("generate", "--from", "d.png", "-o", "f.png").fine()
    assert "repeating d.png as f.png\n" in ran.stderr


def test_a_file_that_was_made_again_without_a_record_is_refused(draft, generate, workdir):
    generate(*SMALL, "--seed", "9", "-o", "d.png").fine()
    later = (workdir / "d.json").stat().st_mtime + 10
    os.utime("d.png", (later, later))
    said = "d.png is newer than its record d.json, so it may hold another clip; name the record"
    assert repeated("d.png").sentence().startswith(said)
    assert repeated("d.json").json()["request"]["seed"] == 7


def test_files_of_the_record_are_found_from_another_folder(draft, workdir, monkeypatch):
    (workdir / "other").mkdir()
    (workdir / "other/mine.yaml").write_text("sparsity: {tile: null}\n")  # is not meant
    monkeypatch.chdir(workdir / "other")
    made = repeated("../d.png").json()
    assert made["request"]["profile"] == str(workdir / "mine.yaml")
    assert np.array_equal(frames("../d-2.png"), frames("../d.png"))


def test_what_several_clips_and_what_beside_the_sparse_one_is_refused(generate, workdir):
    small = ("--frames", "1", "--steps", "2")
    series = generate(*small, "--num", "2", "-o", "s.png", "--json")
    (workdir / "series.json").write_text(series.stdout)
    said = "--from s-000.png: it is one of 2 files with numbers, which are not all of one clip"
    assert repeated("s.png").sentence().startswith(said)
    generate(*small, "--compare", "-o", "c.gif", "--report", "c.json").fine()
    for kind in ("dense", "compare"):
        said = repeated(f"c-{kind}.gif").sentence()
        assert said == f"c-{kind}.gif is the {kind} file of c.gif; name that one, or c.json"


def test_dense_and_a_quality_replace_each_other():
    recorded = {"seed": "7", "quality": "draft", "output": "d.mp4", "fps": "8", "crf": "20"}
    assert "quality" not in _taken(recorded, {"dense"}, Path("d-2.mp4"))
    assert _taken(recorded, {"seed"}, Path("d.gif")) == {"quality": "draft", "fps": "8"}
    assert _taken(recorded, set(), Path("d.png")) == {"seed": "7", "quality": "draft"}
    recorded = {"dense": True, "crf": "20", "output": "d.mp4"}
    assert _taken(recorded, {"quality"}, Path("d-2.mp4")) == {"crf": "20"}
    assert _taken(recorded, {"config"}, Path("d-2.mp4")) == {"crf": "20"}
    assert _taken(recorded, {"steps"}, Path("d-2.mp4")) == {"dense": True, "crf": "20"}


def test_a_clip_of_a_series_and_of_a_manifest_is_found_by_its_file(generate, batch, workdir):
    small = ("--frames", "1", "--steps", "3")
    series = generate(*small, "--num", "2", "--seed", "4", "-o", "s.png", "--json")
    (workdir / "series.json").write_text(series.stdout)
    said = "--from series.json is about 2 clips; name the file of one, such as s-000.png"
    assert repeated("series.json").sentence() == said
    made = repeated("s-001.png").json()
    assert (made["request"]["seed"], made["files"]) == (5, {"output": ["s-001-2.png"]})
    assert np.array_equal(frames("s-001.png"), frames("s-001-2.png"))
    (workdir / "prompts.csv").write_text("prompt,seed\na red circle,3\n")
    (clip,) = batch(*small, "--format", "gif", "--json").json()["clips"]
    for source in (f"out/{clip['file']}", "out/manifest.jsonl"):
        asked = repeated(source, "-o", "m.gif").json()["request"]
        assert (asked["prompt"], asked["seed"]) == ("a red circle", 3)
        ours = frames("m.gif")
        theirs = frames(f"out/{clip['file']}")
        assert np.array_equal(ours, theirs)


def test_numbered_frames_are_one_clip(generate, workdir):
    generate("-o", "v.png", "--steps", "2", "--report", "v.json").fine()
    assert find_record(workdir / "v.png") == find_record(workdir / "v-000.png")
    assert repeated("v.png").json()["files"]["output"][-1] == "v-2-004.png"
    assert new_name(workdir / "v.png") == workdir / "v-3.png"


GONE = "d.json was made with --{0} gone, which is gone; give another --{0}"


@pytest.mark.parametrize(
    ("words", "facts", "said"),
    [
        (
            None,
            {},
            "the record of d.json lacks the command that made it; type its settings instead",
        ),
        (
            [],
            {},
            "the record of d.json does not say its seed and output; type its settings instead",
        ),
        (["--output", ""], {}, "the record of d.json does not say its output; type its settings"),
        (["--old", "1"], {}, "the recorded command has --old, which generate does not take"),
        (["--image", "gone"], {}, GONE.format("image")),
        (["--config", "gone"], {}, GONE.format("config")),
        (["--lora", "gone:0.5"], {"loras": [{"file": "gone"}]}, GONE.format("lora")),
        (["--model", "gone"], {}, "the model folder gone does not exist; a hub name has the form"),
        ([], {"transformer_class": "Flux"}, "d.json was made by a Flux, and {model} now has a Wan"),
    ],
)
def test_what_is_missing_is_one_sentence(workdir, model_folder, loads_nothing, words, facts, said):
    command = None if words is None else ["chipsparse", "generate", "a circle", *words]
    if words or facts:
        command += ["--seed", "1"]
    if (words or facts) and "--output" not in words:
        command += ["--output", "d.gif"]
    if words is not None and "--model" not in words:
        command += ["--model", str(model_folder)]
    request = {"command": command or [], **facts}
    (workdir / "d.json").write_text(json.dumps({"request": request}))
    with nothing_written(workdir):
        assert repeated("d.json").sentence().startswith(said.format(model=model_folder))


def test_files_that_are_no_record(workdir, draft):
    Image.new("RGB", (8, 8)).save("alone.png")
    (workdir / "other.json").write_text('{"a": [1]}')
    (workdir / "deep.json").write_text("[" * 100_000)
    for words, said in {
        ("gone.mp4",): "--from gone.mp4 does not exist; name a record, or a file that generate wr",
        (".",): "--from . is no file; name a record, or a file that generate wrote",
        ("other.json",): "--from other.json is no record of a generation; name a file of",
        ("alone.png",): "there is no record of alone.png in its folder; generate writes one with",
        ("d.png", "-o", "d.png"): "--output d.png would replace d.png, which is read",
        ("d.json", "--report", "d.json"): "--report d.json would replace d.json, which is read",
    }.items():
        assert repeated(*words).sentence().startswith(said)
    shutil.move("d.png", "elsewhere.png")
    assert "no record of elsewhere.png" in repeated("elsewhere.png").sentence()
    assert not names(workdir, "*-2*")


def test_words_are_read_as_they_are_written():
    words = ["chipsparse", "generate", "--lora", "a:1", "--lora", "b", "--dense", "--", "--prompt"]
    values = words_values(GenerateOptions, words)
    assert values == {"lora": ["a:1", "b"], "dense": True, "prompt": "--prompt"}
    with pytest.raises(UserError, match="the record is of another command: chipsparse tune"):
        words_values(GenerateOptions, ["chipsparse", "tune", "--seed", "1"])


def test_an_image_and_a_lora_are_those_of_the_record(flux_folder, workdir, generate):
    pytest.importorskip("peft")
    Image.new("RGB", (48, 32), "red").save("in.png")
    name = "transformer.single_transformer_blocks.0.attn.to_q"
    weights = {f"{name}.lora_A.weight": (4, 32), f"{name}.lora_B.weight": (32, 4)}
    tensors = {key: np.full(size, 0.1, np.float32) for key, size in weights.items()}
    save_file(tensors, "l.safetensors")
    given = ("--image", "in.png", "--strength", "0.5", "--lora", "l.safetensors:0.5")
    settings = ("--steps", "4", "-o", "i.png", "--report", "i.json", "--json")
    asked = generate(*given, *settings, model=flux_folder).json()["request"]
    made = repeated("i.png").json()["request"]
    image, lora = (str(Path(name).absolute()) for name in ("in.png", "l.safetensors"))
    loras = [{"file": lora, "scale": 0.5}]
    assert made == {**asked, "command": made["command"], "image": image, "loras": loras}
    assert asked["strength"] == 0.5
    assert np.array_equal(frames("i-2.png"), frames("i.png"))


def test_the_record_of_an_overwritten_file_is_the_newest_one(generate, workdir):
    small = ("--frames", "1", "--steps", "2", "-o", "o.png")
    for seed in ("1", "2"):
        generate(*small, "--seed", seed, "--report", f"r{seed}.json").fine()
    words = find_record(workdir / "o.png").command
    assert words[words.index("--seed") + 1] == "2"
    assert json.loads((workdir / "r1.json").read_text())["request"]["seed"] == 1
