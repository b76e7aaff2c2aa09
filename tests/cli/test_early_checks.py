"""Simple mistakes and `--help` do not wait for torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from chipsparse.cli import option_checks
from chipsparse.cli.commands.bench import BenchOptions
from chipsparse.cli.commands.compare import CompareOptions
from chipsparse.cli.commands.explain import ExplainOptions
from chipsparse.cli.commands.generate import GenerateOptions
from chipsparse.cli.commands.tune import TuneOptions
from chipsparse.cli.errors import UserError
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
    ["bench", "--vram", "much"],
    ["studio", "--port", "65536"],
    ["studio", "--seed", "-1"],
]
NAMES = "generate batch explain tune compare bench report models studio"
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
    assert len(ran.stderr.splitlines()) == len(MISTAKES)
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_seeds_that_pytorch_takes(seed):
    option_checks.check_seed("--seed", seed)


@pytest.mark.parametrize(("seed", "count"), [(2**64, 1), (2**64 - 1, 2), (-1, 1)])
def test_seeds_that_it_does_not(seed, count):
    with pytest.raises(UserError, match="--seed"):
        option_checks.check_seed("--seed", seed, count=count)


COMMANDS = [BenchOptions, CompareOptions, ExplainOptions, GenerateOptions, TuneOptions]


@pytest.mark.parametrize("kind", COMMANDS)
def test_options_mean_the_same_in_every_command(kind):
    needed = {"output": Path("a.yaml")} if kind in (GenerateOptions, TuneOptions) else {}
    with pytest.raises(UserError, match="--guidance-scale nan must be a finite number"):
        kind(**needed, guidance_scale=float("nan")).check()
