"""Files get their names all together or not at all."""

import os
import signal

import pytest

from chipsparse.common import finished_files
from chipsparse.common.finished_files import place, write_whole

OLD = {"a": "old a", "b": "old b", "stale": "old"}
NEW = {"a": "new a", "b": "new b", "c": "new c"}


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
        files = {folder / name: scratch / f"new-{name}" for name in NEW}
        for path, file in files.items():
            file.write_text(NEW[path.name])
        place(files, stale=[folder / "stale"], scratch=scratch)

    return run


@pytest.fixture(params=[True, False])
def links(request, monkeypatch):
    """File systems with hard links and without."""

    def refuses(*_, **__):
        raise PermissionError("no hard links here")

    if not request.param:
        monkeypatch.setattr(finished_files.os, "link", refuses)


def around_replace(monkeypatch, *, before=lambda source: None, after=lambda: None):
    replace = os.replace

    def replaced(source, path):
        before(source)
        replace(source, path)
        after()

    monkeypatch.setattr(finished_files.os, "replace", replaced)


def content(folder):
    return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.is_file()}


@pytest.mark.usefixtures("links")
def test_all_take_their_names_and_stale_ones_go(place_all, folder):
    place_all()
    assert content(folder) == NEW


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize("target", ["a", "b", "c"])
def test_a_failure_undoes_everything(place_all, folder, monkeypatch, target):
    def full(source):
        if source.name == f"new-{target}":
            raise OSError(28, "No space left on device")

    around_replace(monkeypatch, before=full)
    with pytest.raises(OSError, match="No space left"):
        place_all()
    assert content(folder) == OLD


@pytest.mark.parametrize("name", ["c", "stale"])
def test_a_folder_is_never_replaced_nor_removed(place_all, folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(IsADirectoryError, match=f"{name} is a folder"):
        place_all()
    assert (folder / name).is_dir()
    assert content(folder) == {kept: text for kept, text in OLD.items() if kept != name}


def test_a_signal_undoes_everything_unless_a_program_only_notes_it(place_all, folder, monkeypatch):
    around_replace(monkeypatch, after=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        place_all()
    assert content(folder) == OLD
    (folder.parent / "scratch").rename(folder.parent / "before")
    noted = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        place_all()
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(noted) == {signal.SIGINT}
    assert content(folder) == NEW


def test_a_text_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    write_whole(path, "ü " + os.fsdecode(b"d\xff\xc3\xbc"))  # a name of a file that is no UTF-8
    assert content(tmp_path) == {"r.json": "ü d\ufffdü"}
    monkeypatch.setattr(finished_files.Path, "read_bytes", lambda _: b"new")
    with pytest.raises(OSError, match=r"r\.json reads back as something else"):
        write_whole(path, "new, and more")
    monkeypatch.undo()
    assert content(tmp_path) == {"r.json": "ü d\ufffdü"}
    assert os.listdir(tmp_path) == ["r.json"]
