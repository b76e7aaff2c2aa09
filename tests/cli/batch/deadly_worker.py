"""A worker that needs no model and does to itself what its prompt says."""

import os
import signal
import time
from pathlib import Path

import chipsparse
from chipsparse.cli.batch.engine import Loaded, Made, Refused


class DeadlyWorker:
    """Prompts: ``fine``, ``kill``, ``exit``, ``refuse``, and ``kill unless FILE``, made by it.

    ``last kill`` is done by the last of several processes alone; the others wait for it.
    """

    def __init__(self, options, threads, place):
        self._where = f"{options.device} of {os.getpid()}"
        self._place = place

    def load(self):
        return Loaded(chipsparse.__version__, self._where)

    def make(self, task):
        what, _, file = task.prompt.partition(" unless ")
        if what.startswith("last "):
            if self._place.rank < self._place.ranks - 1:
                time.sleep(60)
            what = what.removeprefix("last ")
        if file:
            what = "fine" if Path(file).exists() else what
            Path(file).touch()
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit":
            os._exit(3)
        if what == "refuse":
            return Refused("ValueError: no")
        time.sleep(0.05)
        return Made(task.prompt.encode() + b"\n", b"", 0.05, (), ())
