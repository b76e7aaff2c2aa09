"""An actor that needs no model and does to itself what its prompt says."""

import os
import signal
import time
from pathlib import Path

import chipsparse
from chipsparse.cli.batch.maker import Made


class DeadlyActor:
    """Prompts: ``fine``, ``kill``, ``refuse``, ``break``, and ``kill unless FILE``, made by it.

    ``last kill`` is done by the last of several actors alone; the others wait for it.
    """

    def __init__(self, rank):
        self._rank = rank

    def load(self, request):
        return chipsparse.__version__, "here"

    def make_bytes(self, entry):
        what, _, file = entry.prompt.partition(" unless ")
        if what.startswith("last "):
            if self._rank.rank < self._rank.ranks - 1:
                time.sleep(60)
            what = what.removeprefix("last ")
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
