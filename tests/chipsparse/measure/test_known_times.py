"""Measured times outlive a process; whatever else is in their files is ignored."""

import json
import multiprocessing

import pytest

from chipsparse.measure.known_times import KnownTimes

FACTS = {"device": "NVIDIA H200", "versions": {"torch": "2.11"}, "grids": ((1, 1, 64),)}
TIMES = {"sparse": 0.5, "dense": 1.25}


def test_what_is_kept_is_found_by_another_process_and_no_other_facts_find_it(tmp_path):
    folder = tmp_path / "made" / "with it"
    assert KnownTimes(folder).find(FACTS) is None
    assert KnownTimes(folder).keep(FACTS, TIMES) == TIMES
    assert KnownTimes(folder).find(FACTS) == TIMES
    assert KnownTimes(folder).find(FACTS | {"device": "NVIDIA L4"}) is None
    assert KnownTimes(folder).find(FACTS | {"versions": {"torch": "2.12"}}) is None
    assert len(list(folder.iterdir())) == 1  # nothing half-written beside it


def test_the_first_to_write_is_right(tmp_path):
    KnownTimes(tmp_path).keep(FACTS, TIMES)
    assert KnownTimes(tmp_path).keep(FACTS, {"sparse": 9.0, "dense": 9.0}) == TIMES


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe not text",
        b"[]",
        b'{"milliseconds": {"sparse": 1.0}}',
        b'{"facts": {"device": "another"}, "milliseconds": {"sparse": 1.0}}',
        "cut",
        "null",
        "list",
        "not a number",
        "endless",
        "zero",
    ],
)
def test_a_corrupt_or_foreign_file_is_ignored_and_replaced(tmp_path, content):
    KnownTimes(tmp_path).keep(FACTS, TIMES)
    (path,) = tmp_path.iterdir()
    right = json.loads(path.read_text())
    if isinstance(content, str):
        values = {
            "null": None,
            "list": [1.0, 2.0],
            "not a number": {"sparse": float("nan"), "dense": 1.0},
            "endless": {"sparse": float("inf"), "dense": 1.0},
            "zero": {"sparse": 0.0, "dense": 1.0},
        }
        text = path.read_text()[:-9]
        if content != "cut":
            text = json.dumps({**right, "milliseconds": values[content]})
        content = text.encode()
    path.write_bytes(content)
    known = KnownTimes(tmp_path)
    assert known.find(FACTS) is None
    again = {"sparse": 2.0, "dense": 3.0}
    assert known.keep(FACTS, again) == again
    assert KnownTimes(tmp_path).find(FACTS) == again


def _keep(folder, number, queue):
    queue.put(KnownTimes(folder).keep(FACTS, {"sparse": 1.0 + number, "dense": 10.0}))


def test_processes_that_write_at_once_agree(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    writers = [context.Process(target=_keep, args=(tmp_path, n, queue)) for n in range(4)]
    for writer in writers:
        writer.start()
    said = [queue.get(timeout=60) for _ in writers]
    for writer in writers:
        writer.join()
    assert all(each == said[0] for each in said)
    assert KnownTimes(tmp_path).find(FACTS) == said[0]
    assert len(list(tmp_path.iterdir())) == 1


def test_without_a_folder_that_takes_files_nothing_is_kept(tmp_path):
    (tmp_path / "file").write_text("no folder")
    for known in (KnownTimes(None), KnownTimes(tmp_path / "file")):
        assert known.keep(FACTS, TIMES) == TIMES
        assert known.find(FACTS) is None
