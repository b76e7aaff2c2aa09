"""Options are declared once, and simple mistakes do not wait for torch."""

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from pydantic import AfterValidator
from typer.testing import CliRunner

import chipsparse
from chipsparse.cli.batch.options import BatchOptions
from chipsparse.cli.commands import ExplainOptions
from chipsparse.cli.compare.options import CompareOptions
from chipsparse.cli.errors import UserError
from chipsparse.cli.options import (
    REQUIRED,
    GenerateOptions,
    Positive,
    PrintOptions,
    argument,
    as_command,
    command_words,
    option,
    output_option,
    read_value,
)
from chipsparse.cli.tune.options import TuneOptions
from chipsparse.profiles.profile import ASSETS, BUNDLED_MODELS


@dataclass(frozen=True, kw_only=True)
class Base(PrintOptions):
    size: Positive | None = option(help="Size.", shown="small", panel="Shape")
    colour: str = option(help="Colour.", default="red", panel="Shape")


@dataclass(frozen=True, kw_only=True)
class Own(Base):
    what: Annotated[str, AfterValidator(str.upper)] | None = argument(help="What.", metavar="WHAT")
    output: Path = output_option("-o", help="File.", default=REQUIRED)
    late_one: bool = option(help="Late.", default=False, panel="Shape")
    colour: str = option(help="Another colour.", default="blue", panel="Shape")
    debug: bool = False


@pytest.fixture
def paint():
    """Runs a command of these options; returns the result and the options that it was given."""
    given = []

    def paint(options: Own) -> None:
        """Paint something."""
        given.append(options)

    app = typer.Typer()
    app.command()(as_command(paint))
    terminal = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    return lambda *words: (CliRunner().invoke(app, list(words), env=terminal), given)


def test_a_command_gets_what_was_typed(paint):
    ran, (given,) = paint("cat", "-o", "a.png", "--size", "3", "--late-one")
    assert ran.exit_code == 0, ran.output
    assert given == Own(what="CAT", output=Path("a.png"), size=3, late_one=True)
    assert (given.colour, given.json, given.debug) == ("blue", False, False)
    assert given.given() == ["--size", "WHAT", "--output", "--late-one"]
    assert command_words("paint", given, {"size": 4, "late_one": None}) == [
        "chipsparse",
        "paint",
        "CAT",
        "--size",
        "4",
        "--colour",
        "blue",
        "--output",
        "a.png",
    ]
    dashed = dataclasses.replace(given, what="-x", size=None, late_one=True)
    assert command_words("paint", dashed, {})[-3:] == ["--late-one", "--", "-x"]


def test_help_has_texts_defaults_and_no_option_that_was_left_out(paint):
    shown = " ".join(paint("--help")[0].stdout.split())
    for text in ("Paint something.", "Another colour.", "[default: blue]", "(small)", "[required]"):
        assert text in shown
    assert "--debug" not in shown
    assert "--no-late-one" not in shown


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("guidance_scale", float("nan"), "--guidance-scale nan must be a finite number"),
        ("steps", 10**20, "--steps 100000000000000000000 must be less than or equal to 1000"),
        ("device", "cuda:" + "9" * 20, "is no device for this; use auto, cpu, cuda or cuda:N"),
        ("dtype", "int4", "--dtype int4 must be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ("ram", "-1G", "--ram -1G is no amount of memory such as 24G or 512M"),
        ("quality", "best", "--quality: there is no quality 'best'; known are faithful, balanced"),
        ("seed", 2**64, f"must be less than or equal to {2**64 - 1}"),
        ("strength", 0.0, "--strength 0 must be greater than 0"),
    ],
)
def test_values_that_are_wrong_with_any_model(name, value, said):
    with pytest.raises(UserError) as error:
        read_value(GenerateOptions, name, value)
    assert said in str(error.value)


@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_a_bundled_model_is_found_by_its_name(name, workdir):
    for kind in (GenerateOptions, BatchOptions, ExplainOptions, TuneOptions, CompareOptions):
        assert read_value(kind, "model", name) == str(ASSETS / name)
    assert read_value(CompareOptions, "suite", name) == str(ASSETS / name)
    (workdir / name).mkdir()
    assert read_value(GenerateOptions, "model", name) == name


def test_an_installation_without_a_bundled_model_says_what_to_do(workdir, monkeypatch):
    monkeypatch.setattr("chipsparse.profiles.profile.ASSETS", workdir)
    with pytest.raises(UserError, match=r"without the bundled model tiny-flux; name a folder or"):
        read_value(GenerateOptions, "model", "tiny-flux")
    with pytest.raises(ValueError, match=r"'tiny' is no bundled model; these are tiny-wan and ti"):
        chipsparse.bundled_model("tiny")


# All of these are seen from the command line and the file system alone.
MISTAKES = {
    "generate x -o a.mp4 --steps 0": "--steps 0 must be greater than or equal to 1",
    "generate x -o a.avi": "--output a.avi has the suffix .avi; use one of .mp4, .webm, .gif, .png",
    "generate x -o a.tiff --model tiny-flux": "suffix .tiff; use one of .png, .jpg, .jpeg, .webp",
    "generate x -o a.mp4 --model tiny-flux": "images, not videos; use a.png, .jpg or .webp",
    "generate x -o a.jpg --fps 9 --model tiny-flux": "--fps is about .mp4, .webm and .gif, and .j",
    "generate x -o no/a.mp4": "the folder no of --output no/a.mp4 does not exist; create it",
    "generate x -o d.mp4": "--output d.mp4 is a folder; name a file in it",
    "generate x -o /proc/a.mp4": "--output /proc/a.mp4 cannot be written: No such file",
    f"generate x -o {'a' * 300}.mp4": "cannot be written: File name too long",
    "generate x -o a.mp4 --compare": "--output a-dense.mp4 is a folder; name a file in it",
    "generate x -o b.mp4 --report r.txt": "--report r.txt must end in .json",
    "generate x -o a.gif --report c.json --config c.json": "--report c.json would replace c.json",
    "generate x -o a.gif --fps 60": "--fps 60 is too fast for a GIF; use 50 or less, or .mp4",
    "generate x -o a.png --fps 24": "--fps is about .mp4, .webm and .gif, and .png has none",
    "generate x -o b.mp4 --crf 52": "--crf 52 is out of range; for .mp4 it must be from 0 to 51",
    "generate x -o b.mp4 --strength 1": "--strength needs an --image",
    "generate x -o b.mp4 --model /nowhere": "the model folder /nowhere does not exist",
    "generate x -o b.mp4 --model d.mp4/no": "the model folder d.mp4/no does not exist; a hub name",
    "generate x -o b.mp4 --model tiny-fluks": "bundled models are tiny-wan and tiny-flux",
    "generate x -o b.mp4 --image no.png": "--image no.png does not exist",
    "generate x -o b.mp4 --lora no.safetensors": "--lora no.safetensors does not exist; name a",
    "generate -o b.mp4": "give a prompt, or a file of them with --prompts; got neither",
    "generate x -o b.mp4 --prompts f.txt": "give a prompt, or a file of them with --prompts; not",
    "generate -o b.mp4 --prompts e.txt": "--prompts e.txt has no prompt; write one a line",
    "generate -o b.mp4 --prompts no.txt": "--prompts no.txt could not be read: No such file",
    "generate x -o b.mp4 --dense --compare": "--dense and --compare exclude each other",
    "generate x -o b.mp4 --dense --gpus 2": "several GPUs share the sparse run, which --dense",
    f"generate x -o b.mp4 --seed {2**64 - 1} --num 2": "2 seeds from there go beyond 2^64 - 1",
    **{
        f"generate x -o a.gif --dense {words}": "is about the sparse run, which --dense leaves out"
        for words in ("--quality fast", "--report r.json", "--ram 1G")
    },
    # What the model's files decide.
    "generate x -o b.mp4 --height 100": "--height 100 does not fit this model, which needs a mult",
    "generate x -o b.mp4 --frames 10": "--frames 10 does not fit this model, which needs a multip",
    "generate x -o b.mp4 --frames 9999": "--frames 9999 is too large for this model; the largest",
    "explain --width 100": "--width 100 does not fit this model",
    "tune -o p.yaml --min-psnr 30 --height 100": "--height 100 does not fit this model",
    "batch f.txt -o out --height 100": "f.txt are wrong: line 1: --height 100 does not fit this",
    "generate x -o b.mp4 --config flux.yaml": "flux.yaml is for FluxTransformer2DModel, but the mo",
    "generate x -o b.mp4 --model d.mp4": "d.mp4 is not a diffusers model folder: it has no model",
    "generate x -o b.mp4 --model half": "half is incomplete: model_index.json names transformer, b",
    "batch f.txt -o out --format mp4 --model tiny-flux": "images, not videos; use --format png",
    # What any model and machine decide.
    "generate x -o b.mp4 --device cpu --vram 8G": "--vram 8G has no effect on a CPU; use --ram",
    "explain --device cpu --vram 8G": "--vram 8G has no effect on a CPU; use --ram",
    "generate x -o b.mp4 --guidance-parallel 2": "--guidance-parallel 2 needs a multiple of 2 GPUs",
    "explain --gpus 3 --guidance-parallel 2": "--guidance-parallel 2 needs a multiple of 2 GPUs",
    "tune -o p.yaml --min-psnr 30 --prompts e.txt": "--prompts e.txt has no prompt; write one a l",
    "batch e.txt -o out": "e.txt has no prompt",
    "batch seeds.csv -o out": "wrong: line 2: --seed one must be a valid integer",
    "batch f.txt -o out --best clip": "--best clip chooses among drafts; add --drafts N",
    "batch f.txt -o out --drafts 2 --best nice": "--best nice is no score; use clip, sharpness",
    "batch f.txt -o out --drafts 2 --num 2": "--num makes finished files of all seeds; --drafts",
    "generate --from no.mp4": "--from no.mp4 does not exist; name a record, or a file that gener",
    "generate --from c.json": "--from c.json is no record of a generation; name a file of gener",
    "generate x": "missing option '--output' / '-o'; chipsparse generate --help tells more",
    "report no.json -o r.html": "the file no.json does not exist",
    "report c.json -o r.txt": "--output r.txt must end in .html",
    "explain --model=": "--model is empty; leave it out for the bundled tiny model",
    "studio --port 65536": "--port 65536 must be less than or equal to 65535",
}
NAMES = "generate batch explain tune compare report models studio"


def test_nothing_simple_imports_torch(workdir):
    """One process for all of them: what one imported, the next ones would have too."""
    (workdir / "f.txt").write_text("a red circle\n")
    (workdir / "e.txt").write_text("# none\n")
    (workdir / "c.json").write_text("{}")
    (workdir / "flux.yaml").write_text("model_class: FluxTransformer2DModel\n")
    (workdir / "seeds.csv").write_text("prompt,seed\na cat,one\n")
    (workdir / "half").mkdir()
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (workdir / "half" / "model_index.json").write_text(json.dumps(index))
    for name in ("d.mp4", "a-dense.mp4"):
        (workdir / name).mkdir()
    code = (
        "import sys\n"
        "from chipsparse.cli.main import app\n"
        "for arguments, expected in CASES:\n"
        "    try: app(arguments)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == expected, (arguments, end.code)\n"
        "    assert 'torch' not in sys.modules, arguments\n"
    )
    cases = [(["--help"], 0), *(([name, "--help"], 0) for name in NAMES.split())]
    cases += [(line.split(), 2) for line in MISTAKES]
    before = sorted(workdir.iterdir())
    words = [sys.executable, "-c", f"CASES = {cases!r}\n{code}"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    for (line, sentence), said in zip(MISTAKES.items(), ran.stderr.splitlines(), strict=True):
        assert said.startswith("chipsparse: error: "), said
        assert sentence in said, line
    assert sorted(workdir.iterdir()) == before


def test_a_config_may_be_compared_with_itself():
    """Its clips are the same, which tells how far generations repeat."""
    same = CompareOptions(a="fast", b="fast")
    assert same.configs == {"A: fast": {"quality": "fast"}, "B: fast": {"quality": "fast"}}
