"""`chipsparse batch` on the tiny model."""

import json

import pytest

from tests.cli.conftest import command


@pytest.fixture
def batch(model_folder, workdir):
    """Runs the command; what it is given is in ``prompts.csv`` or named."""

    def run(*arguments, file="prompts.csv", model=model_folder):
        usual = {"-o": "out", "--device": "cpu", "--model": str(model)}
        given = [word for name in usual if name not in arguments for word in (name, usual[name])]
        return command("batch", file, *given, *arguments)

    return run


@pytest.fixture
def manifest(workdir):
    """The lines of the manifest in ``out``."""

    def read():
        return [json.loads(line) for line in (workdir / "out/manifest.jsonl").open()]

    return read
