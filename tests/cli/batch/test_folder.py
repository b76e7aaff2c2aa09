"""The manifest and the claims of a folder that a batch fills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chipsparse.cli.batch.claims import Claims
from chipsparse.cli.batch.manifest import Manifest
from chipsparse.cli.errors import UserError


def test_the_last_line_about_a_file_counts(tmp_path):
    manifest = Manifest(tmp_path)
    assert manifest.read() == {}
    manifest.add({"file": "a.mp4", "state": "failed"})
    manifest.add({"file": "b.mp4", "state": "made", "prompt": "ein Würfel\n\u2028"})
    manifest.add({"file": "a.mp4", "state": "made"})
    found = manifest.read()
    assert found["a.mp4"]["state"] == "made"
    assert found["b.mp4"]["prompt"] == "ein Würfel\n\u2028"
    assert manifest.path.read_bytes().count(b"\n") == 3


def test_a_line_that_was_broken_off_loses_no_other(tmp_path):
    manifest = Manifest(tmp_path)
    manifest.add({"file": "a.mp4"})
    with manifest.path.open("a") as file:
        file.write('{"file": "b.mp4", "sta')
    manifest.add({"file": "c.mp4"})
    assert list(manifest.read()) == ["a.mp4", "c.mp4"]
    assert json.loads(manifest.path.read_text().splitlines()[-1]) == {"file": "c.mp4"}


def test_a_name_that_is_no_utf_8(tmp_path):
    manifest = Manifest(tmp_path)
    manifest.add({"file": "a.mp4", "command": ["-o", Path(os.fsdecode(b"d\xff"))]})
    assert manifest.read()["a.mp4"]["command"] == ["-o", "d\ufffd"]


def test_a_manifest_that_is_none(tmp_path):
    (tmp_path / "manifest.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"manifest\.jsonl could not be read"):
        Manifest(tmp_path).read()


CLAIM = """
import sys
from pathlib import Path
from chipsparse.cli.batch.claims import Claims
with Claims(Path(sys.argv[1])) as claims:
    print(*(claims.take(digest) for digest in sys.argv[2:]), flush=True)
    sys.stdin.read()
"""


def test_two_processes_never_have_the_same_claim(tmp_path):
    a, b = "00f0", "f" * 16
    arguments = [sys.executable, "-c", CLAIM, str(tmp_path), a]
    with Claims(tmp_path) as claims:
        with subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout.readline() == "True\n"
            assert not claims.take(a)
            assert claims.take(b)
            again = subprocess.run(
                [*arguments, b], input="", capture_output=True, text=True, check=True
            )
            assert again.stdout == "False False\n"
            other.kill()  # the system lets go of its claims
        assert claims.take(a)
        assert claims.take(a)  # its own
        claims.let_go(b)
        free = subprocess.run([*arguments, b], input="", capture_output=True, text=True, check=True)
        assert free.stdout == "False True\n"
    assert os.listdir(tmp_path) == [".claims"]
