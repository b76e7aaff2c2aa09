"""Files get their names all together or not at all."""

import os
import signal

import pytest

from chipsparse.common import finished_files
from chipsparse.common.finished_files import place, write_whole

OLD = {"a": "old a", "b": "old b", "stale": "old"}


@pytest.fixture
def folder(tmp_path):
    """Holds files of an earlier run."""
    folder = tmp_path / "out"
    folder.mkdir()
    for name, text in OLD.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def place_all(folder, tmp_path):
    """Places a, b and c, and removes what is stale."""

    def run():
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        files = {folder / name: scratch / f"new-{name}" for name in "abc"}
        for path, file in files.items():
            file.write_text(f"new {path.name}")
        place(files, stale=[folder / "stale"], scratch=scratch)

    return run


def test_names_that_are_no_utf_8(tmp_path):
    write_whole(tmp_path / "a", "ü " + os.fsdecode(b"d\xff\xc3\xbc"))
    assert (tmp_path / "a").read_text("utf-8") == "ü d\ufffdü"


def content(folder):
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("links", [True, False])
def test_all_take_their_names_and_stale_ones_go(place_all, folder, monkeypatch, links):
    if not links:
        monkeypatch.setattr(finished_files.os, "link", _refuses)
    place_all()
    assert content(folder) == {"a": "new a", "b": "new b", "c": "new c"}


def _refuses(*_, **__):
    raise PermissionError("no hard links here")


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("target", ["a", "b", "c"])
def test_a_failure_undoes_everything(place_all, folder, monkeypatch, target, links):
    if not links:
        monkeypatch.setattr(finished_files.os, "link", _refuses)
    replace = os.replace

    def fails(source, path):
        if source.name == f"new-{target}":
            raise OSError(28, "No space left on device")
        replace(source, path)

    monkeypatch.setattr(finished_files.os, "replace", fails)
    with pytest.raises(OSError, match="No space left"):
        place_all()
    assert content(folder) == OLD


def test_a_stale_file_that_cannot_be_removed_undoes_everything(place_all, folder):
    (folder / "stale").unlink()
    (folder / "stale").mkdir()
    with pytest.raises(IsADirectoryError):
        place_all()
    assert (folder / "a").read_text() == "old a"
    assert not (folder / "c").exists()


def test_a_signal_undoes_everything(place_all, folder, monkeypatch):
    replace = os.replace

    def interrupted(source, path):
        replace(source, path)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(finished_files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        place_all()
    assert content(folder) == OLD


def test_a_signal_that_a_program_only_notes_undoes_nothing(place_all, folder, monkeypatch):
    noted, replace = [], os.replace

    def interrupted(source, path):
        replace(source, path)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(finished_files.os, "replace", interrupted)
    before = signal.signal(signal.SIGTERM, lambda number, _: noted.append(number))
    try:
        place_all()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert set(noted) == {signal.SIGTERM}
    assert content(folder) == {"a": "new a", "b": "new b", "c": "new c"}


def test_a_folder_is_never_replaced(place_all, folder):
    (folder / "c").mkdir()
    with pytest.raises(IsADirectoryError, match="c is a folder"):
        place_all()
    assert (folder / "c").is_dir()
    assert (folder / "a").read_text() == "old a"


def test_a_text_that_reads_back_as_another_one_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("old")
    monkeypatch.setattr(finished_files.Path, "read_bytes", lambda _: b"new")
    with pytest.raises(OSError, match=r"r\.json reads back as something else"):
        write_whole(path, "new, and more")
    monkeypatch.undo()
    assert content(tmp_path) == {"r.json": "old"}
