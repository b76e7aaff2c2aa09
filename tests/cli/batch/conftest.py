"""`chipsparse batch` on the tiny model."""

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
