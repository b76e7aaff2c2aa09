"""Simple mistakes and `--help` do not wait for torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from chipsparse.cli import option_checks
from chipsparse.cli.commands.compare import CompareOptions
from chipsparse.cli.commands.explain import ExplainOptions
from chipsparse.cli.commands.tune import TuneOptions
from chipsparse.cli.errors import UserError
from chipsparse.cli.options import GenerateOptions
from chipsparse.profiles.profile import ASSETS

# What is wrong with each of these is seen from the command line and the file system alone.
MISTAKES = [
    ["generate", "x", "-o", "a.mp4", "--steps", "0"],
    ["generate", "x", "-o", "a.avi"],
    ["generate", "x", "-o", "no/a.mp4"],
    ["generate", "x", "-o", "a.mp4", "--frames", "-1"],
    ["generate", "x", "-o", "a.mp4", "--device", "gpu"],
    ["generate", "x", "-o", "a.mp4", "--ram", "lots"],
    ["generate", "x", "-o", "a.mp4", "--model", ""],
    ["generate", "x", "-o", "a.mp4", "--model", "/nowhere"],
    ["generate", "x", "-o", "a.mp4", "--config", "no.yaml"],
    ["generate", "x", "-o", "a.mp4", "--image", "no.png"],
    ["generate", "x", "-o", "a.mp4", "--lora", "no.safetensors"],
    ["generate", "-o", "a.mp4", "--prompts", "no.txt"],
    ["batch", "no.csv", "-o", "out"],
    ["batch", str(ASSETS / "prompts/shapes.txt"), "-o", "out", "--crf", "99"],
    ["explain", "--steps", "0"],
    ["explain", "--dtype", "int4"],
    ["explain", "--flow-shift", "0"],
    ["tune", "-o", "p.yaml", "--min-psnr", "30", "--height", "0"],
    ["compare", "dense", "profile", "--guidance-scale", "-1"],
    ["studio", "--port", "65536"],
    ["studio", "--seed", "-1"],
]
# What is given there would be without effect.
WITHOUT_EFFECT = [
    ("generate x -o a.png --fps 24", "--fps is about .mp4, .webm and .gif, and .png has none"),
    ("generate x -o a.png --crf 12", "--crf is about .mp4 and .webm, and .png has none"),
    ("generate x -o a.mp4 --strength 1", "--strength is about the image of --image, and there is"),
    *(
        (f"generate x -o a.mp4 --dense {option}", "is about the sparse run, which --dense leaves")
        for option in ("--quality fast", "--strict", "--report r.json", "--ram 1G", "--vram 1G")
    ),
    ("compare dense fast --amplify 2", "--amplify is about --output, and there is none"),
    ("compare a.png b.png --fps 24", "--fps is about --output, and there is none"),
    ("compare dense fast --fps 24 -o a.png", "--fps is about .mp4, .webm and .gif, and .png has"),
    (
        "studio --fps film",
        "--fps film is no rate; give a number such as 24 or 23.976, or 24000/1001",
    ),
]
MISTAKES += [given.split() for given, _ in WITHOUT_EFFECT]
NAMES = "generate batch explain tune compare report models studio"
HELP = [[name, "--help"] for name in NAMES.split()]


def test_nothing_simple_imports_torch(workdir):
    """One process for all of them: what one imported, the next ones would have too."""
    code = (
        "import sys\n"
        "from chipsparse.cli.main import app\n"
        "for arguments, expected in CASES:\n"
        "    try: app(arguments)\n"
        "    except SystemExit as end:\n"
        "        assert end.code == expected, (arguments, end.code)\n"
        "    assert 'torch' not in sys.modules, arguments\n"
    )
    cases = [(["--help"], 0), *((each, 0) for each in HELP), *((each, 2) for each in MISTAKES)]
    ran = subprocess.run(
        [sys.executable, "-c", f"CASES = {cases!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    said = ran.stderr.splitlines()
    assert len(said) == len(MISTAKES)
    for (_, sentence), line in zip(reversed(WITHOUT_EFFECT), reversed(said), strict=False):
        assert sentence in line
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "rate"),
    [("24", 24), ("23.976", 23.976), ("30000/1001", 30000 / 1001), ("48/2", 24), ("16.0", 16)],
)
def test_rates_of_frames(text, rate):
    found = option_checks.read_fps(text)
    assert (found, type(found)) == (rate, type(rate))


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_seeds_that_pytorch_takes(seed):
    option_checks.check_seed("--seed", seed)


@pytest.mark.parametrize(("seed", "count"), [(2**64, 1), (2**64 - 1, 2), (-1, 1)])
def test_seeds_that_it_does_not(seed, count):
    with pytest.raises(UserError, match="--seed"):
        option_checks.check_seed("--seed", seed, count=count)


COMMANDS = [CompareOptions, ExplainOptions, GenerateOptions, TuneOptions]


@pytest.mark.parametrize("kind", COMMANDS)
def test_options_mean_the_same_in_every_command(kind):
    needed = {"output": Path("a.yaml")} if kind in (GenerateOptions, TuneOptions) else {}
    with pytest.raises(UserError, match="--guidance-scale nan must be a finite number"):
        kind(**needed, guidance_scale=float("nan")).check()
