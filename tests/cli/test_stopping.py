"""A command that is asked to stop: one line, its exit code, soon, and nothing half-written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chipsparse.common import stopping
from chipsparse.profiles.profile import ASSETS

SIZE = ["--model", str(ASSETS / "tiny-flux"), "--height", "64", "--width", "64", "--device", "cpu"]
GENERATE = ["generate", "a red circle", *SIZE, "-o", "o.png"]
SECONDS = 3.0  # from the signal to the end
# Code that runs before the command: what is said on the standard output is waited for.
READY = "os.write(1, b'ready\\n')"
IN_IMPORT = f"""
import sys
class Slow:
    def find_spec(self, name, *_):
        if name == "{{module}}":
            {READY}
            end = time.monotonic() + 60
            while time.monotonic() < end: pass
sys.meta_path.insert(0, Slow())
"""
IN_TORCH = f"""
from chipsparse.experiments import clips
import torch
def generate(*_, **__):
    large = torch.ones(9_000, 9_000)
    {READY}
    large @ large @ large
clips.generate = generate
"""
IN_DESTRUCTOR = f"""
from chipsparse.cli import request
class Late:
    def __del__(self):
        {READY}
        end = time.monotonic() + 60
        while time.monotonic() < end: pass
def load(*_, **__):
    Late()
    time.sleep(60)
request.load_pipeline = load
"""
SWALLOWED = f"""
from chipsparse.cli import request
def load(*_, **__):
    try:
        {READY}
        time.sleep(60)
    except BaseException: pass
    time.sleep(60)
request.load_pipeline = load
"""
MADE_ANOTHER = f"""
from chipsparse.cli import request
def load(*_, **__):
    try:
        {READY}
        time.sleep(60)
    except BaseException as error: raise ImportError("no") from error
request.load_pipeline = load
"""
CLEANING = f"""
from chipsparse.cli import request
from chipsparse.common import stopping
def load(*_, **__):
    with stopping.done_at_least(lambda: time.sleep(1)):
        try:
            {READY}
            time.sleep(60)
        except BaseException: pass
        time.sleep(60)
request.load_pipeline = load
"""
WRITING = f"""
from chipsparse.cli.media import write
import numpy as np
def write_pngs(path, *_):
    path.write_bytes(b"half")
    large = np.ones((9_000, 9_000))
    {READY}
    large @ large @ large
write._write_pngs = write_pngs
"""


def started(before, *words):
    """Return the process of a command, when it said that it is ready."""
    code = f"import os\nimport time\n{before}\nfrom chipsparse.cli.main import main\nmain()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


def ends(process, number=signal.SIGINT, *, times=1):
    """Return the lines of a process that gets a signal, which is gone soon."""
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.1)
    try:
        said, lines = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 128 + number, lines
    assert said == ""
    return [line for line in lines.splitlines() if line not in ("loading the model", "")]


INTERRUPTED = ["chipsparse: interrupted, nothing was written"]


@pytest.mark.parametrize("module", ["chipsparse.cli.commands", "typer"])
def test_ctrl_c_in_the_first_imports(workdir, module):
    assert ends(started(IN_IMPORT.replace("{module}", module), *GENERATE)) == INTERRUPTED
    assert os.listdir() == []


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch", "diffusers", "transformers", "PIL.Image"])
def test_ctrl_c_in_later_imports(workdir, module):
    assert ends(started(IN_IMPORT.replace("{module}", module), *GENERATE)) == INTERRUPTED
    assert os.listdir() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "number", "word"),
    [
        pytest.param(IN_TORCH, signal.SIGINT, "interrupted", id="torch"),
        pytest.param(IN_TORCH, signal.SIGTERM, "ended by SIGTERM", id="torch, SIGTERM"),
        pytest.param(IN_DESTRUCTOR, signal.SIGINT, "interrupted", id="destructor"),
        pytest.param(SWALLOWED, signal.SIGINT, "interrupted", id="swallowed"),
        pytest.param(MADE_ANOTHER, signal.SIGINT, "interrupted", id="another error"),
        pytest.param(WRITING, signal.SIGINT, "interrupted", id="writing"),
    ],
)
def test_signals_that_the_main_thread_does_not_hear(workdir, before, number, word):
    Path("o.png").write_text("older")
    lines = ends(started(before, *GENERATE), number)
    assert lines[-1] == f"chipsparse: {word}, nothing was written"
    assert not any(word in line for line in lines[:-1])
    assert not any("Traceback" in line for line in lines)
    assert (os.listdir(), Path("o.png").read_text()) == (["o.png"], "older")


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(workdir):
    started_process = started(IN_TORCH, *GENERATE)
    begun = time.monotonic()
    assert ends(started_process, times=2)[-1:] == INTERRUPTED
    assert time.monotonic() - begun < stopping.SECONDS_TO_END


@pytest.mark.slow
def test_further_ones_do_not_hold_up_what_is_to_be_done_at_the_end(workdir):
    assert ends(started(CLEANING, *GENERATE), times=8)[-1:] == INTERRUPTED


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("verb", ["generate", "explain"])
def test_ctrl_c_at_any_moment(workdir, verb, delay):
    words = {"generate": GENERATE, "explain": ["explain", *SIZE]}[verb]
    process = subprocess.Popen(
        [sys.executable, "-m", "chipsparse", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(delay)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    _, lines = process.communicate(timeout=SECONDS)
    assert "Traceback" not in lines
    if process.returncode:  # else it was done before
        assert process.returncode == 130
        assert lines.splitlines()[-1].startswith("chipsparse: interrupted")
        assert lines.count("chipsparse: ") == 1
        assert os.listdir() == []


@pytest.mark.slow
def test_results_are_told_though_a_step_is_long(workdir):
    """The first clip of a series is written; the second one is ended in PyTorch."""
    before = """
from chipsparse.experiments import clips
import torch
make = clips.generate
def generate(*given, **named):
    if named["seed"] == 0: return make(*given, **named)
    large = torch.ones(9_000, 9_000)
    os.write(1, b"ready\\n")
    large @ large @ large
clips.generate = generate
"""
    process = started(before, *GENERATE, "--num", "2", "--steps", "3")
    process.send_signal(signal.SIGINT)
    said, lines = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "o-000.png" in said
    assert lines.splitlines()[-1] == "chipsparse: interrupted, 1 of the series was written"
    assert os.listdir() == ["o-000.png"]


ENDING = r"""
import atexit, os, sys
from chipsparse.cli.main import main
class Late:
    def __del__(self, write=os.write): write(1, b"freed by the interpreter\n")
late = Late()
sys.argv[1:] = [WORD]
try: main()
finally: atexit.register(print, "registered behind")
"""


@pytest.mark.parametrize(("word", "code"), [("--version", 0), ("--no-such-option", 2)])
@pytest.mark.parametrize("name", ["chipsparse", "other.py"])
def test_a_command_does_not_wait_for_the_interpreters_own_end(tmp_path, word, code, name):
    """A program that calls the command has an end of its own."""
    (tmp_path / name).write_text(ENDING.replace("WORD", repr(word)))
    words = [sys.executable, tmp_path / name]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == code
    assert "registered behind\n" in ran.stdout
    assert ("freed by the interpreter\n" in ran.stdout) == (name == "other.py")
