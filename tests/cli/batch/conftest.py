"""`chipsparse batch` on the tiny model."""

import json
import time

import pytest

from chipsparse.cli.batch import job
from chipsparse.cli.batch.worker import PipelineWorker
from tests.cli.conftest import command


class InThisProcess:
    """An engine without processes."""

    page, most = "", 1

    def __init__(self, device):
        self.device = device
        self._answers = []

    def start(self, worker, options, threads):
        self._worker = PipelineWorker(options, None)
        self._answers = [(worker, self._worker.load())]

    def submit(self, worker, task):
        self._answers.append((worker, self._worker.make(task)))

    def wait(self, seconds):
        if not self._answers:
            time.sleep(seconds)
        found, self._answers = self._answers, []
        return found

    def close(self):
        self._worker = None


@pytest.fixture
def batch(model_folder, workdir, monkeypatch):
    """Runs the command in this process; what it is given is in ``prompts.csv`` or named."""
    monkeypatch.setattr(job, "_engine", lambda options, here: InThisProcess(options.device))

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
