"""An actor that needs no model and does to itself what its prompt says."""

import os
import signal
from pathlib import Path

from chipsparse.cli.batch.entries import Maker
from chipsparse.cli.batch.ray_actors import _Actor
from chipsparse.cli.progress import silent_display


class DeadlyMaker(Maker):
    """Prompts: ``fine``, ``kill``, ``break``, and ``kill unless FILE``, made by it."""

    def load(self, request, progress):
        pass

    def make(self, entry, folder):
        what, _, file = entry.prompt.partition(" unless ")
        if file and Path(file).exists():
            what = "fine"
        if file:
            Path(file).touch()
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "break":
            raise RuntimeError("CUDA error")
        entry.thumbnail(folder).parent.mkdir()
        entry.thumbnail(folder).touch()
        (folder / entry.name).write_text(f"{entry.prompt}\n")
        return entry.clip("made", seconds=0.05)


class DeadlyActor(_Actor):
    def __init__(self, version):
        super().__init__(version)
        self._maker = DeadlyMaker(silent_display())
