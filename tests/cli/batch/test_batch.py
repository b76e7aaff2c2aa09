"""The command: what it makes, what it leaves alone, and what it says of what cannot be made."""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from chipsparse.cli.batch import job as batch_job
from chipsparse.cli.batch import worker
from chipsparse.cli.batch.engine import Failed, Refused
from chipsparse.cli.batch.entries import file_name
from chipsparse.cli.errors import UserError
from chipsparse.cli.generate import job as generate_job
from chipsparse.cli.media.read import read_clip
from chipsparse.cli.options import GenerateOptions
from chipsparse.experiments import clips as denoise
from tests.cli.conftest import names
from tests.cli.html_reader import PageReader

SMALL = ("--frames", "1", "--steps", "3")
TWO = "prompt,seed,steps\na red circle,7,\na blue square,,2\n"


@pytest.fixture
def no_loading(monkeypatch):
    monkeypatch.setattr(generate_job, "load_pipeline", lambda *_, **__: pytest.fail("loaded"))


def read(ran):
    return json.loads(ran.stdout)


def test_what_a_batch_makes_and_that_it_makes_it_once(
    batch, workdir, manifest, generate, monkeypatch
):
    (workdir / "prompts.csv").write_text(TWO + "a red circle,7,\n")
    ran = batch(*SMALL, "--format", "gif", "--json").fine()
    found = read(ran)
    assert (found["made"], found["already_there"], found["failed"]) == (2, 0, 0)
    circle, square = found["rows"]
    assert (circle["lines"], circle["seed"], square["seed"]) == ([2, 4], 7, 0)
    assert circle["settings"] == "48x32, 1 frame, 3 steps, sparse"
    assert names("out", "*.gif") == sorted([circle["file"], square["file"]])
    assert names("out/thumbnails") == [Path(name).stem + ".jpg" for name in names("out", "*.gif")]
    # Each is what `generate` makes, and the manifest has the words for it.
    lines = {line["file"]: line for line in manifest()}
    assert set(lines) == {circle["file"], square["file"]}
    line = lines[circle["file"]]
    assert (line["state"], line["tries"], line["settings"]["num_inference_steps"]) == ("made", 1, 3)
    command = [word for word in line["command"] if word not in ("chipsparse", "generate")]
    command[command.index("--output") + 1] = "alone.gif"
    generate(*command, prompt=None, model=None).fine()
    made = read_clip(workdir / "out" / circle["file"]).frames
    assert np.array_equal(made, read_clip(workdir / "alone.gif").frames)
    # Nothing is made again.
    monkeypatch.setattr(generate_job, "load_pipeline", lambda *_, **__: pytest.fail("loaded"))
    before = (workdir / "out/manifest.jsonl").read_bytes()
    again = batch(*SMALL, "--format", "gif", "--json").fine()
    assert [row["state"] for row in read(again)["rows"]] == ["already there"] * 2
    assert [row["seconds"] for row in read(again)["rows"]] == [
        row["seconds"] for row in found["rows"]
    ]
    assert (workdir / "out/manifest.jsonl").read_bytes() == before


def test_only_what_is_missing_is_made(batch, workdir, manifest):
    (workdir / "prompts.csv").write_text("Prompt;Note\na red circle;1\na blue square;2\n")
    ran = batch(*SMALL, "--format", "gif", "--json")
    assert ran.stderr.count("warning: prompts.csv: no setting, and ignored: note\n") == 1
    first = read(ran)
    gone = workdir / "out" / first["rows"][0]["file"]
    content = gone.read_bytes()
    gone.unlink()
    (workdir / "out/manifest.jsonl").unlink()  # it is made of what is there
    second = read(batch(*SMALL, "--format", "gif", "--json"))
    assert [row["state"] for row in second["rows"]] == ["made", "already there"]
    assert gone.read_bytes() == content
    assert {line["file"] for line in manifest()} == {row["file"] for row in first["rows"]}
    third = read(batch(*SMALL, "--format", "gif", "--seed", "1", "--json"))
    assert [row["state"] for row in third["rows"]] == ["made", "made"]
    assert len(names("out", "*.gif")) == 4


def test_the_page(batch, workdir):
    text = "a <b>red</b> circle & more"
    (workdir / "p.jsonl").write_text(json.dumps({"prompt": text, "num": 2}) + "\n")
    assert batch(*SMALL, file="p.jsonl").exit_code == 0
    page = (workdir / "out/index.html").read_text()
    read = PageReader(page)
    assert read.problems == []
    assert "2 of 2 files" in read.headings
    assert read.texts.count(text) == 2
    shown = [given for tag, given in read.elements if tag == "img"]
    assert [given["alt"] for given in shown] == [text] * 2
    for given in shown:
        with Image.open(workdir / "out" / given["src"]) as image:
            assert (image.format, image.size) == ("JPEG", (48, 32))
    links = [given["href"] for tag, given in read.elements if tag == "a"]
    assert sorted(links) == names("out", "*.mp4")
    assert str(workdir) not in page


def test_a_folder_whose_name_is_no_utf_8(batch, workdir):
    (workdir / "prompts.csv").write_text("prompt\na red circle\n")
    folder = os.fsdecode(b"d\xff")
    found = read(batch(*SMALL, "--num", "2", "--format", "gif", "-o", folder, "--json").fine())
    assert (found["made"], found["folder"]) == (2, "d\ufffd")
    assert names(folder, "*.gif") == sorted(row["file"] for row in found["rows"])
    again = read(batch(*SMALL, "--num", "2", "--format", "gif", "-o", folder, "--json").fine())
    assert again["already_there"] == 2
    assert (workdir / folder / "index.html").read_text("utf-8")


def test_the_digest_is_of_prompt_seed_and_settings():
    settings = {"steps": 3, "size": [32, 48]}
    name = file_name("a", 0, settings, ".mp4")
    assert name == file_name("a", 0, dict(reversed(settings.items())), ".mp4")
    assert name == "a245e746a381bc1e.mp4"  # that of files which people have
    others = [("b", 0, settings), ("a", 1, settings), ("a", 0, {**settings, "steps": 4})]
    assert len({name, *(file_name(*each, ".mp4") for each in others)}) == 4


def test_a_changed_profile_makes_other_files(batch, broken_model, workdir):
    (workdir / "prompts.csv").write_text("prompt\na\n")
    given = (*SMALL, "--format", "gif", "--json")
    (first,) = read(batch(*given, model=broken_model))["rows"]
    profile = broken_model / "chipsparse.yaml"
    profile.write_text(profile.read_text().replace("every: 10", "every: 9"))
    (second,) = read(batch(*given, model=broken_model))["rows"]
    assert first["file"] != second["file"]


def test_flow_shifts_are_not_mixed(batch, workdir, monkeypatch, manifest):
    (workdir / "prompts.csv").write_text("prompt\na red circle\n")

    def file(state, *arguments):
        ran = batch(*SMALL, "--format", "gif", "--json", *arguments).fine()
        (row,) = read(ran)["rows"]
        assert row["state"] == state
        return row["file"]

    own = file("made")
    shifted = file("made", "--flow-shift", "6")
    assert shifted != own
    assert (workdir / "out" / own).read_bytes() != (workdir / "out" / shifted).read_bytes()
    assert [line["flow_shift"] for line in manifest()] == [None, 6.0]
    monkeypatch.setattr(batch_job, "_make", lambda *_: pytest.fail("made again"))
    assert file("already there") == own
    assert file("already there", "--flow-shift", "6.0") == shifted


@pytest.mark.parametrize("name", ["weights", "scheduler", "lora"])
def test_other_files_of_a_model_make_other_files(batch, broken_model, workdir, monkeypatch, name):
    """A byte in the first tensor, as where a LoRA was fused; a config; a byte of a LoRA."""

    def nothing(options, engine, folder, missing, made, given_up, here):
        given_up.update(entry.name for entry in missing)

    monkeypatch.setattr(batch_job, "_make", nothing)
    (workdir / "prompts.csv").write_text("prompt\na\n")
    lora = workdir / "lora.safetensors"
    save_file({f"{each}.lora_A.weight": np.zeros(200_000, np.uint8) for each in "ab"}, lora)

    def file():
        ran = batch(*SMALL, "--lora", str(lora), "--json", model=broken_model)
        (row,) = read(ran)["rows"]
        return row["file"]

    before = file()
    assert file() == before
    if name == "scheduler":
        path = broken_model / "scheduler/scheduler_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"shift": 9.0}))
    else:
        path = lora
        if name == "weights":
            (path,) = (broken_model / "transformer").glob("*.safetensors")
        content = bytearray(path.read_bytes())
        content[8 + int.from_bytes(content[:8], "little")] ^= 1
        path.write_bytes(content)
    assert file() != before


@pytest.mark.parametrize(
    ("content", "sentences"),
    [
        (  # seen from the lines alone
            "prompt,steps,crf\na,,\nb,0,\nc,,99\n",
            ["2 of 3 prompts of prompts.csv", "line 3: --steps 0 is", "line 4: --crf 99 is out"],
        ),
        (  # a value that cannot be read beside one that cannot be
            "prompt,seed,steps\na,,\nb,x,\nc,,0\n",
            ["2 of 3 prompts", 'line 3: its seed is "x"', "line 4: --steps 0 is"],
        ),
        (  # seen from the model's configs
            "prompt,height,frames\na,,\nb,33,\nc,,6\n",
            ["line 3: --height 33 does not fit this model", "line 4: --frames 6 does not fit"],
        ),
        (  # more than can be listed
            "prompt,num\na,\nb,100001\n",
            ["line 3: --num 100001 is too large; it must be at most 100000"],
        ),
        (
            "prompt,num\n" + "a,501\n" * 2000,
            ["error: prompts.csv asks for 1002000 clips; one command makes at most 1000000"],
        ),
        ("prompt,image\na,\nb,no.png\n", ["line 3: --image no.png does not exist"]),
        ("prompt,quality\na,\nb,fast\n", ["line 3: ", "it has no qualities"]),
    ],
)
def test_bad_lines_are_named_before_anything_is_loaded(
    batch, workdir, no_loading, content, sentences
):
    (workdir / "prompts.csv").write_text(content)
    error = batch().refused()
    assert error.count("\n") == 1
    for sentence in sentences:
        assert sentence in error
    assert names(workdir) == ["prompts.csv"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--engine", "dask"), "--engine dask is not known; use accelerate or ray"),
        (("--gpus-per-job", "0"), "--gpus-per-job 0 is too small"),
        (("--gpus-per-job", "2"), "error: 12 video or image tokens make 1 block of 128 rows"),
        (("--gpus-per-job", "3"), "error: this model has 2 attention heads, fewer than the 3"),
        (
            ("--gpus-per-job", "2", "--dense"),
            "error: several GPUs share the sparse run, which --dense",
        ),
        (
            ("--gpus-per-job", "3", "--guidance-parallel", "2"),
            "needs a multiple of 2 GPUs, and there are to be 3; give --gpus-per-job",
        ),
        (("--tries", "0"), "--tries 0 is too small"),
        (("--workers", "0"), "--workers 0 is too small"),
        (("--format", "avi"), "--format avi is not known"),
        (("--format", "png", "--fps", "24"), "--fps is about .mp4, .webm and .gif, and .png has"),
        (("--format", "png", "--crf", "1"), "--crf is about .mp4 and .webm, and .png has none"),
        (("--format", "png"), "a video of 5 frames is no single .png; use --format mp4"),
        (("-o", "prompts.csv"), "--output prompts.csv is a file; name a folder"),
        (("-o", "no/out"), "the folder no of --output no/out does not exist; create it first"),
        (
            ("-o", "prompts.csv/out"),
            "--output prompts.csv/out is below prompts.csv, which is no folder",
        ),
        (("--model", "none"), "the model folder none does not exist"),
    ],
)
def test_bad_options(batch, workdir, no_loading, arguments, sentence):
    (workdir / "prompts.csv").write_text("prompt\na\nb\n")
    error = batch(*arguments).refused()
    assert sentence in error
    assert error.count("\n") == 1
    assert names(workdir) == ["prompts.csv"]


def test_ray_that_is_not_installed(batch, workdir, monkeypatch):
    (workdir / "prompts.csv").write_text("prompt\na\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = batch("--engine", "ray").refused()
    assert "not installed: pip install 'chipsparse[ray]'\n" in error


def test_weights_that_cannot_be_loaded_leave_nothing(batch, broken_model, workdir):
    (workdir / "prompts.csv").write_text("prompt\na\n")
    (broken_model / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"")
    error = batch(*SMALL, model=broken_model).refused()
    assert "diffusion_pytorch_model.safetensors is damaged" in error
    assert names(workdir) == ["prompts.csv"]


@pytest.fixture
def breaks_at(monkeypatch):
    """Lets the generation of one seed fail with an error."""
    make = denoise.generate

    def arrange(seed, error):
        def generate(*arguments, **options):
            if options["seed"] == seed:
                raise error
            return make(*arguments, **options)

        monkeypatch.setattr(denoise, "generate", generate)

    return arrange


def test_a_prompt_that_fails(batch, workdir, manifest, breaks_at):
    (workdir / "prompts.csv").write_text("prompt\na red circle\n")
    breaks_at(1, ValueError("no such token"))
    ran = batch(*SMALL, "--num", "2")
    assert ran.exit_code == 1
    assert "1 made, 1 failed of 2" in ran.stdout
    sentence = "ValueError: no such token"
    assert f"chipsparse: error: line 2, seed 1: {sentence}\n" in ran.stderr
    (failed,) = [line for line in manifest() if line["state"] == "failed"]
    assert (failed["error"], failed["tries"], failed["seed"]) == (sentence, 1, 1)
    page = PageReader((workdir / "out/index.html").read_text())
    assert sentence in page.sections["Failed"]
    breaks_at(None, None)  # another run tries it again
    assert "1 made, 1 already there of 2" in batch(*SMALL, "--num", "2").stdout
    assert "Failed" not in PageReader((workdir / "out/index.html").read_text()).sections


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (UserError("values that are not finite"), Refused("values that are not finite")),
        (ValueError("no such token"), Refused("ValueError: no such token")),
        (RuntimeError("CUDA error"), Failed("RuntimeError: CUDA error")),
    ],
)
def test_what_a_worker_says_of_an_error(monkeypatch, error, answer):
    """A prompt that is refused is refused again; after anything else the worker is replaced."""
    made = worker.PipelineWorker(GenerateOptions(output=Path("a.gif"), prompt=""), None)
    monkeypatch.setattr(made, "_made", Mock(side_effect=error))
    assert made.make(None) == answer


def test_an_interruption_keeps_what_was_made(batch, workdir, breaks_at):
    (workdir / "prompts.csv").write_text("prompt\na red circle\n")
    breaks_at(1, KeyboardInterrupt())
    ran = batch(*SMALL, "--num", "3")
    assert ran.exit_code == 130
    kept = "what was finished is in the folder; the same command goes on"
    assert ran.stderr.splitlines()[-1] == f"chipsparse: interrupted, {kept}"
    assert len(names("out", "*.mp4")) == 1
    page = PageReader((workdir / "out/index.html").read_text())
    assert "1 of 3 files" in page.headings
    breaks_at(None, None)


def test_the_pipeline_is_loaded_once_and_stays_patched_while_settings_are_the_same(
    batch, workdir, monkeypatch
):
    (workdir / "prompts.csv").write_text("prompt,steps\na,3\nb,3\nc,2\n")
    counts = {"load": 0, "opened": 0}
    for name in counts:
        function = getattr(worker, name)

        def counting(*given, function=function, name=name):
            counts[name] += 1
            return function(*given)

        monkeypatch.setattr(worker, name, counting)
    batch("--frames", "1").fine()
    assert counts == {"load": 1, "opened": 2}


def test_images(batch, flux_folder, workdir):
    (workdir / "p.txt").write_text("a red circle\n")
    ran = batch("--steps", "2", "--json", file="p.txt", model=flux_folder).fine()
    (row,) = read(ran)["rows"]
    assert row["file"].endswith(".png")
    with Image.open(workdir / "out" / row["file"]) as image:
        assert image.size == (48, 32)


def test_images_are_no_videos(batch, flux_folder, workdir, no_loading):
    (workdir / "p.txt").write_text("a red circle\n")
    error = batch("--format", "mp4", file="p.txt", model=flux_folder).refused()
    assert error.endswith("error: this model makes images, not videos; use --format png\n")
    assert names(workdir) == ["p.txt"]


def test_prompts_with_and_without_an_image_are_no_batch(batch, flux_folder, workdir, no_loading):
    Image.new("RGB", (48, 32)).save(workdir / "a.png")
    (workdir / "prompts.csv").write_text("prompt,image\na,\nb,a.png\n")
    error = batch(model=flux_folder).refused()
    assert "line 3: it needs FluxImg2ImgPipeline, and line 2 FluxPipeline; make" in error
