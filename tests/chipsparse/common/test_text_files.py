"""Text files: whole ones or none."""

import os

import pytest

from chipsparse.common.text_files import read_text, write_text


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "notes.txt"
    write_text(path, "höher\udce4\n")  # the name of a file that is no UTF-8
    assert read_text(path) == "höher\ufffd\n"
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_text(path, "new")
    assert (os.listdir(tmp_path), read_text(path)) == (["notes.txt"], "höher\ufffd\n")
