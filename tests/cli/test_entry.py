"""Ways to start the command: `python -m chipsparse`, shell completion, other locales."""

import os
import subprocess
import sys
from io import BytesIO, TextIOWrapper

import pytest
from typer.testing import CliRunner

from chipsparse.cli import main
from chipsparse.cli.main import app
from tests.tiny_models import PROMPT


def start(*arguments, closed=(), **environment):
    """Runs the command, as a shell does that closed some of its streams."""
    return subprocess.run(
        [sys.executable, "-m", "chipsparse", *arguments],
        capture_output=True,
        timeout=120,
        env={**os.environ, **environment},
        preexec_fn=lambda: [os.close(number) for number in closed],
    )


def test_a_prompt_beyond_ascii_in_the_c_locale(workdir):
    """Python then decodes arguments as ASCII, and would print nothing else."""
    (workdir / "würfel.txt").write_text("")
    given = ("generate", "ein Würfel", "-o", "würfel.avi")
    ran = start(*given, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert ran.returncode == 2
    assert ran.stderr.decode().startswith(
        "chipsparse: error: --output würfel.avi has the suffix .avi"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nope",), "no such command 'nope'; chipsparse --help tells more"),
        (
            ("generate", PROMPT),
            "missing option '--output' / '-o'; chipsparse generate --help tells",
        ),
        (("explain", "--steps", "x"), "invalid value for '--steps': "),
        (("generate", "--stpes", "4"), "no such option: --stpes (Possible options: "),
    ],
)
def test_mistyped_words_are_one_sentence(arguments, said):
    ran = start(*arguments)
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert ran.stderr.decode().startswith(f"chipsparse: error: {said}")
    assert ran.stderr.count(b"\n") == 1


def test_the_command_alone_shows_its_help():
    ran = start()
    assert (ran.returncode, ran.stderr) == (2, b"")
    assert ran.stdout.decode().strip() == start("--help").stdout.decode().strip()


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_streams_that_are_closed(workdir, closed):
    ran = start("--version", closed=closed)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout.startswith(b"chipsparse ") != (1 in closed)
    wrong = start("generate", "a", "-o", "a.avi", closed=closed)
    assert (wrong.returncode, wrong.stdout) == (2, b"")  # not there in place of the other one
    assert wrong.stderr.startswith(b"chipsparse: error: --output a.avi") != (2 in closed)


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [
        ("latin-1", b"5 ? d?\n"),
        ("utf-8", b"5 \xe2\x82\xac d\xff\n"),
        ("ascii", b"5 \xe2\x82\xac d\xff\n"),
    ],
)
def test_what_is_printed_in_other_encodings(monkeypatch, encoding, printed):
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(BytesIO(), encoding=encoding))
    monkeypatch.setattr(main, "app", lambda **_: print("5 €", os.fsdecode(b"d\xff")))
    main.main()
    assert sys.stdout.buffer.getvalue() == printed


def test_python_without_docstrings_is_refused():
    """transformers fails to be imported there, with pages of errors."""
    ran = subprocess.run(
        [sys.executable, "-OO", "-m", "chipsparse", "--version"], capture_output=True, timeout=120
    )
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert ran.stderr.startswith(b"chipsparse: error: python -OO drops the docstrings")
    assert ran.stderr.count(b"\n") == 1


def test_a_shell_completes_the_command_however_it_was_started(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/x/chipsparse/__main__.py", "--help"])
    seen = {}
    monkeypatch.setattr(main, "app", lambda **given: seen.update(given))
    main.main()
    assert seen == {"prog_name": "chipsparse", "standalone_mode": False}


def test_bytes_that_are_no_text(workdir):
    ran = start("generate", b"caf\xe9", "-o", "a.mp4")
    assert ran.returncode == 2
    assert ran.stderr.decode().startswith("chipsparse: error: the prompt holds bytes that are no")
    assert ran.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("words", "offered"),
    [("chipsparse ge", "generate"), ("chipsparse generate --sch", "--scheduler")],
)
def test_completion(words, offered):
    environment = {
        "_CHIPSPARSE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    result = CliRunner().invoke(app, [], prog_name="chipsparse", env=environment)
    assert offered in result.stdout.split()


@pytest.mark.parametrize("option", ["--show-completion", "--install-completion"])
def test_completion_can_be_installed(option):
    assert option in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
