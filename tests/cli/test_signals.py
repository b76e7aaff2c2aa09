"""Ctrl-C, SIGTERM, SIGHUP: one line, the usual exit code, nothing left. Full and closed outputs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from chipsparse.cli import signals
from chipsparse.cli.errors import reported_errors
from chipsparse.cli.generate import job
from chipsparse.cli.media import report_file
from chipsparse.cli.media import write as media
from chipsparse.common import finished_files
from chipsparse.experiments import clips as denoise
from tests.cli.conftest import command
from tests.variants import slow

STOPS = [
    (signal.SIGINT, 130, "interrupted"),
    (signal.SIGTERM, 143, "ended by SIGTERM"),
    (signal.SIGHUP, 129, "ended by SIGHUP"),
]


@pytest.fixture(autouse=True)
def hangup_counts():
    """Under nohup this process ignores it, and so would the commands that run in it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def loading(monkeypatch, stop):
    monkeypatch.setattr(job, "load_pipeline", stop)


def denoising(monkeypatch, stop):
    monkeypatch.setattr(denoise, "_as_frames", stop)


def encoding(monkeypatch, stop):
    def half(path, *_):
        path.write_bytes(b"half a file")
        stop()

    monkeypatch.setitem(media.WRITERS, ".gif", half)


def moving(monkeypatch, stop):
    replace = os.replace

    def stopped(*arguments):
        replace(*arguments)
        stop()

    monkeypatch.setattr(finished_files.os, "replace", stopped)


def reporting(monkeypatch, stop):
    monkeypatch.setattr(report_file, "write_checked", stop)


# A signal means the same at every moment.
@pytest.mark.parametrize(
    ("moment", "number", "code", "word"),
    [
        *((moment, *STOPS[0]) for moment in (loading, denoising, encoding, moving, reporting)),
        *(slow(denoising, *stop) for stop in STOPS[1:]),
    ],
)
def test_nothing_is_left_of_a_generation(
    generate, workdir, temporary, monkeypatch, moment, number, code, word
):
    for name in ("o.gif", "r.json"):
        (workdir / name).write_text("older")
    before = {each: signal.getsignal(each) for each in signals.STOP_SIGNALS}
    moment(monkeypatch, lambda *_, **__: signal.raise_signal(number))
    ran = generate("-o", "o.gif", "--report", "r.json", "--frames", "1")
    assert ran.exit_code == code, ran.stderr
    assert ran.stderr.splitlines()[-1] == f"chipsparse: {word}, nothing was written"
    assert {path.name: path.read_text() for path in workdir.iterdir()} == {
        "o.gif": "older",
        "r.json": "older",
    }
    assert list(temporary.iterdir()) == []
    assert {each: signal.getsignal(each) for each in signals.STOP_SIGNALS} == before


def test_a_stop_while_the_result_is_shown_does_not_deny_the_files(generate, workdir, monkeypatch):
    from chipsparse.cli.generate import summary

    stop = lambda *_, **__: signal.raise_signal(signal.SIGINT)  # noqa: E731
    monkeypatch.setattr(summary, "print_summary", stop)
    ran = generate("-o", "o.gif", "--frames", "1")
    assert ran.stderr.splitlines()[-1] == "chipsparse: interrupted, everything was written"
    assert (workdir / "o.gif").is_file()


def test_signals_that_were_ignored_stay_ignored():
    """As under `nohup`, and in a script that runs the command in the background."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with reported_errors(debug=False):
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# A command that does not wait for torch.
COMMAND = """
import sys
import numpy as np
from pathlib import Path
from chipsparse.cli import main
from chipsparse.cli.errors import reported_errors
from chipsparse.cli.media.write import write_media

@main.app.command()
def write():
    with reported_errors(debug=False):
        print("writing", flush=True)
        frames = np.random.default_rng(0).integers(0, 256, (400, 256, 256, 3), dtype=np.uint8)
        write_media({Path("a.webm"): frames}, fps=8)

@main.app.command()
def tell():
    with reported_errors(debug=False):
        print("a result")

main.main()
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(media.__file__).parents[3])}


def children(process):
    try:
        text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    except FileNotFoundError:
        pytest.skip("the system does not tell of children")
    return [int(each) for each in text.split()]


@pytest.mark.parametrize(
    ("number", "code", "word"), [STOPS[0], *(slow(*stop) for stop in STOPS[1:])]
)
def test_ffmpeg_and_its_files_are_gone(workdir, number, code, word):
    """For real: a process of its own that is stopped while ffmpeg works."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "write"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        # A shell script in the background ignores SIGINT, and so would everything it starts.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    try:
        assert process.stdout.readline() == "writing\n"
        while not (encoders := children(process)):
            assert process.poll() is None
            time.sleep(0.01)
        (scratch,) = workdir.iterdir()
        assert scratch.name.startswith(".chipsparse-")
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert stderr == f"chipsparse: {word}, nothing was written\n"
    assert list(workdir.iterdir()) == []
    for encoder in encoders:
        with pytest.raises(ProcessLookupError):
            os.kill(encoder, 0)


# Standard output.


def run_with_stdout(stdout, *arguments):
    """Runs a quick command with a standard output that is not a pipe of ours."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("argument", [slow("--version"), "tell"])
def test_a_full_standard_output(argument):
    with open("/dev/full", "w") as full:
        ran = run_with_stdout(full, argument)
    assert ran.stderr.splitlines()[-1] == (
        "chipsparse: error: the standard output could not be written: No space left on device"
    )
    assert "Exception" not in ran.stderr
    assert ran.returncode == 2


@pytest.mark.parametrize("argument", [slow("--version"), "tell"])
def test_a_reader_that_goes_away(argument):
    """As `head` does: silence."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ran = run_with_stdout(writing, argument)
    finally:
        os.close(writing)
    assert (ran.stderr, ran.returncode) == ("", 1)


def test_a_standard_output_that_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with reported_errors(debug=False):
        print("nowhere")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
        (
            OSError(28, "No space left on device"),
            2,
            "chipsparse: error: the standard output could not be written: No space left on device",
        ),
        (
            FileNotFoundError(2, "No such file", "x"),
            1,
            "chipsparse: error: FileNotFoundError: [Errno 2] No such file: 'x' (--debug shows the "
            "traceback)",
        ),
    ],
)
def test_errors_of_the_output_and_of_files(capsys, monkeypatch, error, code, said):
    def run():
        with reported_errors(debug=False):
            raise error

    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the output of this process is fine
    with pytest.raises(typer.Exit) as end:
        run()
    assert (end.value.exit_code, capsys.readouterr().err.strip()) == (code, said)


def test_the_terminal_is_gone(monkeypatch):
    class Gone:
        def write(self, _):
            raise OSError(5, "Input/output error")

        flush = write

    def run():
        with reported_errors(debug=False), contextlib.redirect_stderr(Gone()):
            signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(sys, "stderr", Gone())
    with pytest.raises(typer.Exit) as end:
        run()
    assert end.value.exit_code == 129


def test_an_interrupted_comparison_tells_what_it_has(workdir, model_folder, monkeypatch):
    (workdir / "prompts.txt").write_text("a red circle\na blue square\na third\n")
    generate, calls = denoise.generate, []

    def stopped(*arguments, **options):
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGTERM)
        return generate(*arguments, **options)

    monkeypatch.setattr(denoise, "generate", stopped)
    given = ["compare", "dense", "profile", "--model", str(model_folder)]
    ran = command(*given, "--prompts", "prompts.txt")
    assert ran.exit_code == 143, ran.stderr
    assert "interrupted: of 3 prompts, the first 2 are compared" in " ".join(ran.stdout.split())


def test_numbers_of_a_comparison_survive_its_picture(workdir, temporary, model_folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    (workdir / "prompts.txt").write_text("a red circle\na blue square\n")
    monkeypatch.setitem(media.WRITERS, ".gif", full)
    given = ["compare", "dense", "profile", "--model", str(model_folder), "-o", "w.gif"]
    ran = command(*given, "--prompts", "prompts.txt")
    assert ran.exit_code == 2
    assert "PSNR" in ran.stdout
    (kept,) = temporary.iterdir()
    assert ran.stderr.splitlines()[-1] == (
        "chipsparse: error: w.gif could not be written: No space left on device; all is kept as "
        f"PNG in {kept}"
    )
