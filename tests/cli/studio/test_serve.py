"""What can be wrong before the page opens: one sentence, exit code 2."""

import importlib.util
import socket

import pytest
from typer.testing import CliRunner

from chipsparse.cli.main import app
from chipsparse.cli.studio import serve
from chipsparse.cli.studio.choices import models_here

FIND_SPEC = importlib.util.find_spec


def with_gradio(monkeypatch, there):
    def find(name, *rest):
        return there or None if name == "gradio" else FIND_SPEC(name, *rest)

    monkeypatch.setattr(serve.importlib.util, "find_spec", find)


def refused(*arguments):
    ran = CliRunner().invoke(app, ["studio", *arguments])
    assert ran.exit_code == 2, ran.output
    (line,) = ran.stderr.splitlines()
    return line


def test_without_gradio_there_is_one_sentence(monkeypatch):
    with_gradio(monkeypatch, False)
    assert "pip install 'chipsparse[studio]'" in refused()


def test_a_port_in_use_is_refused(monkeypatch):
    with_gradio(monkeypatch, True)
    with socket.socket() as other:
        other.bind((serve.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"--port {port} is in use" in refused("--port", str(port))
    assert serve.check_port_is_free(port) == port


def test_a_free_port_is_found():
    assert serve.check_port_is_free(0) > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "65536"], "--port 65536 is too large"),
        (["--model", "/nowhere"], "the model folder /nowhere does not exist"),
        (["--device", "tpu"], "--device tpu is no device"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, sentence):
    assert sentence in refused(*arguments)


def test_a_folder_without_a_model_is_refused(monkeypatch, tmp_path):
    with_gradio(monkeypatch, True)
    line = refused("--model", str(tmp_path), "--port", "0")
    assert "is not a diffusers model folder" in line


def test_the_bundled_models_are_offered(monkeypatch, tmp_path):
    monkeypatch.setattr("chipsparse.cli.studio.choices._cached", lambda: ["a/b", "c/d"])
    names = [name for name, _ in models_here("c/d")]
    assert names == ["c/d", "tiny-wan (bundled)", "tiny-flux (bundled)", "a/b"]
