"""Every mistake gives one sentence, exit code 2, no traceback and no file; so does a signal."""

import os
import re
import signal
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from chipsparse.cli import main, request
from chipsparse.cli.errors import STOP_SIGNALS, UserError, reported_errors
from chipsparse.cli.generate import job
from chipsparse.cli.media import write as media
from chipsparse.config import ConfigError
from chipsparse.experiments import clips
from tests.cli.conftest import command, nothing_written
from tests.tiny_models import PROMPT


def test_memory_that_is_not_there(generate, loads_nothing, monkeypatch):
    monkeypatch.setattr("chipsparse.cli.plan.host_free_bytes", lambda: 1 << 20)
    said = generate().sentence()
    assert re.match(r"48x32 pixels and 5 frames need about .* and 1\.0 MiB are free", said)


def test_debug_shows_the_traceback(generate):
    ran = generate("--steps", "0", "--debug")
    assert ran.exit_code == 2
    assert "Traceback" in ran.stderr
    assert ran.stderr.splitlines()[-1].endswith("--steps 0 must be greater than or equal to 1")


ERRORS = {
    r"ZeroDivisionError: no \(--debug shows the traceback\)$": ZeroDivisionError("no\nat all"),
    "the GPU ran out of memory; ask for fewer --frames .*, or use --dtype bfloat16$": (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    ),
    "the machine ran out of memory; ask for .* or a smaller --height and --width$": (
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    ),
    "density: no number$": ConfigError("density: no number"),
}


@pytest.mark.parametrize("sentence", ERRORS)
def test_errors_of_a_generation(generate, workdir, breaks_at, sentence):
    breaks_at(0, ERRORS[sentence])
    with nothing_written(workdir):
        ran = generate()
    code = 2 if isinstance(ERRORS[sentence], ConfigError) else 1
    assert (ran.exit_code, ran.stdout) == (code, ""), ran.stderr
    assert "Traceback" not in ran.stderr
    assert re.match(f"chipsparse: error: {sentence}", ran.stderr.splitlines()[-1])


def test_values_that_are_not_finite():
    output = SimpleNamespace(frames=np.full((1, 1, 16, 16, 3), np.nan))
    with pytest.raises(UserError, match="not finite; use --dtype bfloat16 or float32"):
        clips._as_frames(output, torch.float16)


@pytest.fixture
def hangup_counts():
    """Under nohup this process ignores it, and so would the commands that run in it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def encoding(path, *_):
    path.write_bytes(b"half a file")
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("place", "number", "code", "word"),
    [
        ((request, "load_pipeline"), signal.SIGINT, 130, "interrupted"),
        ((clips, "_as_frames"), signal.SIGINT, 130, "interrupted"),
        ((clips, "_as_frames"), signal.SIGHUP, 129, "ended by SIGHUP"),
        ((media, "_write_gif"), signal.SIGINT, 130, "interrupted"),
    ],
)
def test_nothing_is_left(generate, workdir, monkeypatch, hangup_counts, place, number, code, word):
    older = dict.fromkeys(("o.gif", "r.json"), "older")
    for name, text in older.items():
        (workdir / name).write_text(text)
    stop = encoding if place[0] is media else lambda *_, **__: signal.raise_signal(number)
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    monkeypatch.setattr(*place, stop)
    ran = generate("-o", "o.gif", "--report", "r.json", "--frames", "1")
    assert ran.exit_code == code, ran.stderr
    assert ran.stderr.splitlines()[-1] == f"chipsparse: {word}, nothing was written"
    assert {path.name: path.read_text() for path in workdir.iterdir()} == older
    assert {each: signal.getsignal(each) for each in STOP_SIGNALS} == before


def test_a_stop_while_the_result_is_shown_does_not_deny_the_files(generate, workdir, monkeypatch):
    stop = lambda *_, **__: signal.raise_signal(signal.SIGINT)  # noqa: E731
    monkeypatch.setattr(job, "print_result", stop)
    ran = generate("-o", "o.gif", "--frames", "1")
    assert ran.stderr.splitlines()[-1] == "chipsparse: interrupted, everything was written"
    assert (workdir / "o.gif").is_file()


def test_signals_that_were_ignored_stay_ignored(hangup_counts):
    """As under `nohup`, and in a script that runs the command in the background."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with reported_errors(debug=False):
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_reader_that_went_away_hears_nothing(capsys, monkeypatch):
    def run():
        with reported_errors(debug=False):
            raise BrokenPipeError(32, "Broken pipe")  # as of `head`

    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the output of this process is fine
    with pytest.raises(typer.Exit) as end:
        run()
    assert (end.value.exit_code, capsys.readouterr().err) == (1, "")


def start(*arguments):
    """Runs the command in a process of its own."""
    words = [sys.executable, "-m", "chipsparse", *arguments]
    return subprocess.run(words, capture_output=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nope",), "no such command 'nope'; chipsparse --help tells more"),
        (("generate", PROMPT), "missing option '--output' / '-o'; chipsparse generate --help"),
        (
            ("generate", "x", "-o", "a.png", "--seed", "1,2"),
            "invalid value for '--seed': it must be a valid integer; --num N makes N seeds, from",
        ),
        (
            ("generate", "x", "-o", "a.png", "--seed", "1", "2", "3"),
            "got unexpected extra argument(s) (2 3); --num N makes N seeds, from --seed on; chi",
        ),
        (
            ("explain", "--steps", "ten"),
            "invalid value for '--steps': it must be a valid integer; chipsparse explain --help",
        ),
        (("generate", "x", "-o", "a.png", "--output", "b.png"), "--output is given 2 times; give"),
        (("generate", "--stpes", "4"), "no such option: --stpes (Possible options: "),
        (("generate", "ein Würfel", "-o", "würfel.avi"), "--output würfel.avi has the"),
        (("generate", b"caf\xe9", "-o", "a.mp4"), "the prompt holds bytes that are no text"),
    ],
)
def test_a_process_that_is_refused_says_one_sentence(workdir, arguments, said):
    ran = start(*arguments)
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert ran.stderr.decode().startswith(f"chipsparse: error: {said}")
    assert ran.stderr.count(b"\n") == 1


def test_the_last_of_two_values_counts_and_is_told(workdir):
    ran = command("explain", "--height", "64", "--json", "--json", "--height", "100")
    assert "warning: --height is given 2 times; the last one counts\n" in ran.stderr
    assert "--json" not in ran.stderr
    assert ran.sentence().startswith("--height 100 does not fit")


@pytest.mark.parametrize("words", ["--version", "generate --help", "models --json"])
def test_an_output_that_takes_no_more(words):
    with Path("/dev/full").open("wb") as full:
        words = [sys.executable, "-m", "chipsparse", *words.split()]
        ran = subprocess.run(
            words,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    assert ran.returncode == 1
    said = b"chipsparse: error: the output could not be written: No space left on device\n"
    assert ran.stderr == said


def test_help_and_version(monkeypatch):
    ran = start()
    assert (ran.returncode, ran.stderr) == (2, b"")
    assert ran.stdout.decode().strip() == start("--help").stdout.decode().strip()
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("", "generate", "explain", "compare"):
        shown = command(*name.split(), "--help").fine().stdout
        assert max(len(line) for line in shown.splitlines()) <= 80
        assert f"Example: chipsparse {name or 'generate'}" in shown
    assert command("--version").fine().stdout.startswith("chipsparse 0.")


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [("latin-1", b"5 ? d?\n"), ("utf-8", b"5 \xe2\x82\xac d\xff\n")],
)
def test_what_is_printed_in_other_encodings(monkeypatch, encoding, printed):
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(BytesIO(), encoding=encoding))
    monkeypatch.setattr(main, "app", lambda **_: print("5 €", os.fsdecode(b"d\xff")))
    main.main()
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == printed


def test_completion():
    environment = {"COMP_WORDS": "chipsparse generate --sch", "COMP_CWORD": "2"}
    environment["_CHIPSPARSE_COMPLETE"] = "complete_bash"
    result = CliRunner().invoke(main.app, [], prog_name="chipsparse", env=environment)
    assert "--scheduler" in result.stdout.split()
