"""An actor that needs no model and does to itself what its prompt says."""

import os
import signal
from pathlib import Path

import chipsparse
from chipsparse.cli.batch.maker import Made


class DeadlyActor:
    """Prompts: ``fine``, ``kill``, ``refuse``, ``break``, and ``kill unless FILE``, made by it."""

    def load(self, request):
        return chipsparse.__version__, "here"

    def make_bytes(self, entry):
        what, _, file = entry.prompt.partition(" unless ")
        if file and Path(file).exists():
            what = "fine"
        if file:
            Path(file).touch()
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "refuse":
            raise ValueError("no")
        if what == "break":
            raise RuntimeError("CUDA error")
        return Made(0.05, (), ()), b"", f"{entry.prompt}\n".encode()
