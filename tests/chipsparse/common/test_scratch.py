"""Scratch folders: none is left, and none that is in use is taken away."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import pytest

from chipsparse.common import scratch
from chipsparse.common.scratch import scratch_folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [None, OSError, KeyboardInterrupt])
def test_a_folder_is_gone_after_use(tmp_path, error):
    before = len(os.listdir("/dev/fd"))
    os.mkdir(tmp_path / f"{scratch._prefix()}stale")
    with suppress(OSError, KeyboardInterrupt), scratch_folder(tmp_path) as folder:
        (folder / "half").write_text("a file")
        assert names(tmp_path) == [folder.name]
        if error is not None:
            raise error
    assert names(tmp_path) == []
    assert len(os.listdir("/dev/fd")) == before


def test_what_a_killed_process_left_is_swept(tmp_path):
    code = (
        "import pathlib, sys; from chipsparse.common.scratch import scratch_folder\n"
        "with scratch_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('a file'); print(flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"\n"
        (left,) = names(tmp_path)
        with scratch_folder(tmp_path) as other:
            assert names(tmp_path) == sorted([left, other.name])  # it is alive
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert names(tmp_path) == [left]
        with scratch_folder(tmp_path) as other:
            assert names(tmp_path) == [other.name]
    finally:
        process.kill()
        process.wait()


def test_what_is_not_ours_stays(tmp_path, monkeypatch):
    (tmp_path / "user").mkdir()
    (tmp_path / f"{scratch._prefix()}link").symlink_to(tmp_path / "user")
    (tmp_path / f"{scratch._prefix()}file").touch()
    monkeypatch.setattr(scratch.platform, "node", lambda: "another machine")
    with scratch_folder(tmp_path) as theirs:
        monkeypatch.undo()
        (tmp_path / ".chipsparse-mine").mkdir()
        before = names(tmp_path)
        with scratch_folder(tmp_path) as folder:
            assert names(tmp_path) == sorted([*before, folder.name])
        assert theirs.is_dir()


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    make, made = tempfile.mkdtemp, []

    def swept(**options):
        made.append(make(**options))
        if len(made) == 1:
            shutil.rmtree(made[0])
        return made[-1]

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", swept)
    with scratch_folder(tmp_path) as folder:
        assert [str(folder)] == made[1:]
        assert folder.is_dir()
    assert names(tmp_path) == []


@pytest.mark.parametrize("locks", [True, False])
def test_folders_of_one_process_leave_each_other_alone(locks, tmp_path, monkeypatch):
    """Also on a file system without locks."""

    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    if not locks:
        monkeypatch.setattr(scratch.fcntl, "flock", no_locks)
    with scratch_folder(tmp_path) as first, scratch_folder(tmp_path) as second:
        assert names(tmp_path) == sorted([first.name, second.name])
    assert names(tmp_path) == []
