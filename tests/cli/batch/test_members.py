"""Workers of several processes: where each is, and what their answers are as one."""

from types import SimpleNamespace

import pytest
import torch

from chipsparse.cli.batch import job
from chipsparse.cli.batch.engine import Died, Failed, Loaded, Made, NotLoaded, Refused, Unavailable
from chipsparse.cli.batch.members import Answers, Meetings
from chipsparse.cli.batch.processes import Processes
from chipsparse.cli.commands.batch import BatchOptions
from chipsparse.cli.errors import UserError
from chipsparse.cli.ranks import Rank

FILE, NOTHING = Made(b"clip", b"thumbnail", 2.0, (), ()), Made(b"", b"", 0.0, (), ())
PEER = Failed("PeerError: rank 1 failed", of_another=True)


def taken(*answers, count=2):
    """What comes of the answers of processes, in the order in which they come."""
    answered = Answers(count)
    return [answered.take(member, answer) for member, answer in answers]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(1, NOTHING), (0, FILE)], [None, FILE]),
        ([(1, Loaded("1", "b")), (0, Loaded("1", "a"))], [None, Loaded("1", "a")]),
        ([(0, NotLoaded("no")), (1, NotLoaded("no"))], [NotLoaded("no"), None]),
        ([(1, Refused("b")), (0, Refused("a"))], [None, Refused("a")]),
        ([(1, Died("killed")), (0, PEER)], [Died("process 2 of 2: killed"), None]),
        ([(1, Failed("CUDA")), (0, PEER)], [Failed("process 2 of 2: CUDA"), None]),
        # Whose fault it was is known later.
        ([(0, PEER), (1, Failed("CUDA"))], [None, Failed("process 2 of 2: CUDA")]),
        ([(0, PEER), (1, Refused("no such token"))], [None, Failed("no such token")]),
        ([(0, PEER), (1, PEER)], [None, PEER]),
        ([(0, FILE), (1, Refused("not finite"))], [None, Failed("not finite")]),
        ([(0, Unavailable()), (1, PEER)], [Unavailable(in_part=True), None]),
    ],
)
def test_answers_of_two_are_one(answers, expected):
    assert taken(*answers) == expected


@pytest.mark.parametrize("answer", [FILE, Died("killed"), Failed("CUDA"), Unavailable(), PEER])
def test_the_answer_of_one_is_its_own(answer):
    assert taken((0, answer), (0, FILE), count=1) == [answer, FILE]


def test_the_next_question_starts_anew():
    taken = Answers(2)
    for _ in range(3):
        assert taken.take(0, FILE) is None
        assert taken.take(1, NOTHING) == FILE


def test_processes_of_a_worker_meet_apart_from_others():
    meetings = Meetings("localhost")
    first, second = meetings.places(2, None), meetings.places(2, 2)
    assert [(each.rank, each.ranks, each.local_rank) for each in first] == [(0, 2, 0), (1, 2, 1)]
    assert {each.guidance for each in first} == {1}
    assert {each.guidance for each in second} == {2}
    (one,), (other,) = ({each.meeting for each in places} for places in (first, second))
    assert (one.host, one.port) == (other.host, other.port)
    assert one.name != other.name
    assert meetings.places(1, None) == [Rank()]


def options(**given):
    return BatchOptions(prompts="p.txt", output="out", **given)


def test_every_worker_has_gpus_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    equal = SimpleNamespace(total_memory=140 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: equal)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    engine = job._engine(options(gpus_per_job=2), Rank())
    assert (engine.device, engine.most) == ("cuda:0", 2)
    started = []
    monkeypatch.setattr(
        Processes,
        "_started",
        lambda _, given, threads, place: (started.append((given.device, place.rank)), None),
    )
    for worker in range(3):
        engine.start(worker, options(), None)
    expected = [("cuda:0", 0), ("cuda:1", 1), ("cuda:2", 0), ("cuda:3", 1)]
    assert started == [*expected, *expected[:2]]  # a third one shares those of the first
    with pytest.raises(UserError, match=r"^--gpus-per-job 6 is more than the 5 GPUs that this"):
        job._engine(options(gpus_per_job=6), Rank())
    with pytest.raises(UserError, match="a launcher started 4 processes with one each; run the"):
        job._engine(options(gpus_per_job=2), Rank(1, 4, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    with pytest.raises(UserError, match=r"^--gpus-per-job 2 would run on GPUs of several kinds"):
        job._engine(options(gpus_per_job=2), Rank())
