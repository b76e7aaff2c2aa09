"""Who is tried again, who is not, and when: with workers that do what a test says."""

import io
from dataclasses import dataclass, field

import pytest
from rich.console import Console

import chipsparse
from chipsparse.cli.batch.dispatch import REST_SECONDS, RESTS, Dispatch
from chipsparse.cli.batch.engine import (
    Died,
    Failed,
    Loaded,
    Made,
    NotLoaded,
    Refused,
    Unavailable,
)
from chipsparse.cli.batch.job import in_turn
from chipsparse.cli.batch.live import LiveLine
from chipsparse.cli.errors import UserError
from chipsparse.cli.ranks import Rank

LOADED = Loaded(chipsparse.__version__, "here")
MADE = Made(b"clip", b"thumbnail", 2.0, (), ())


class Group:
    options = "options"


@dataclass(frozen=True)
class Entry:
    """As much of an entry as the dispatch looks at."""

    name: str
    seed: int = 0
    group: Group = field(default_factory=Group)

    @property
    def prompt(self):
        return self.name

    digest = label = prompt


class Engine:
    """Answers at once, for each file as the list of its name says, from its start to its end."""

    def __init__(self, answers, loads=()):
        self.answers = {name: list(each) for name, each in answers.items()}
        self.loads = list(loads)
        self.started, self.submitted, self._ready = [], [], []

    def start(self, worker, options, threads):
        self.started.append(worker)
        self._ready = [each for each in self._ready if each[0] != worker]
        self._ready.append((worker, self.loads.pop(0) if self.loads else LOADED))

    def submit(self, worker, task):
        self.submitted.append((worker, task.name))
        self._ready.append((worker, self.answers[task.name].pop(0)))

    def wait(self, seconds):
        ready, self._ready = self._ready, []
        return ready


class Folder:
    def __init__(self, there=()):
        self.there = set(there)
        self.given_up = {}
        self.tries = {}

    def has(self, entry):
        return entry.name in self.there

    def keep(self, entry, made, facts):
        self.there.add(entry.name)
        self.tries[entry.name] = facts["tries"]

    def give_up(self, entry, sentence, facts):
        self.given_up[entry.name] = sentence
        self.tries[entry.name] = facts["tries"]

    def failure_elsewhere(self, entry):
        return self.given_up.get(entry.name)


class Claims:
    def __init__(self, elsewhere=None):
        self.elsewhere = dict(elsewhere or {})  # how often another one has it still
        self.taken = set()

    def take(self, digest):
        if self.elsewhere.get(digest, 0):
            self.elsewhere[digest] -= 1
            return False
        self.taken.add(digest)
        return True

    def let_go(self, digest):
        self.taken.remove(digest)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0  # a look at it takes a second
        return self.now


def dispatched(answers, *, workers=1, tries=2, loads=(), folder=None, claims=None):
    folder, claims = folder or Folder(), claims or Claims()
    entries = [Entry(name) for name in answers]
    engine, said = Engine(answers, loads), io.StringIO()
    live = LiveLine(entries, workers, console=Console(file=said, width=200))
    dispatch = Dispatch(engine, folder, claims, live, tries, set(), set(), clock=Clock())
    with live:
        dispatch.run(entries, workers=workers, options="options", threads=None)
    assert claims.taken == set()
    engine.said = said.getvalue()
    return engine, folder, dispatch


def test_every_file_is_made_once():
    answers = {name: [MADE] for name in "abcde"}
    engine, folder, dispatch = dispatched(answers, workers=2)
    assert folder.there == dispatch.made == set("abcde")
    assert [name for _, name in engine.submitted] == list("abcde")
    assert {worker for worker, _ in engine.submitted} == {0, 1}
    assert engine.started == [0, 1]
    assert set(folder.tries.values()) == {1}


@pytest.mark.parametrize("answer", [Died("killed by SIGKILL"), Failed("RuntimeError: no")])
def test_a_worker_that_ends_is_replaced_and_its_prompt_tried_again(answer):
    engine, folder, _ = dispatched({"a": [answer, MADE], "b": [MADE]})
    assert folder.there == {"a", "b"}
    assert folder.tries == {"a": 2, "b": 1}
    assert [name for _, name in engine.submitted] == ["a", "b", "a"]  # behind the others
    assert engine.started == [0, 0]
    assert "it is tried again" in engine.said


def test_a_poisonous_prompt_is_given_up_after_its_tries():
    died = Died("killed by SIGKILL")
    engine, folder, dispatch = dispatched({"a": [died] * 3, "b": [MADE]}, tries=3)
    assert folder.given_up == {"a": "killed by SIGKILL"}
    assert dispatch.given_up == {"a"}
    assert folder.there == {"b"}
    assert folder.tries["a"] == 3
    assert engine.started == [0] * 4
    assert "error: a: killed by SIGKILL (tried 3 times)" in engine.said


def test_what_the_code_refuses_is_not_tried_again():
    engine, folder, _ = dispatched({"a": [Refused("ValueError: no")], "b": [MADE]}, tries=5)
    assert folder.given_up == {"a": "ValueError: no"}
    assert folder.tries == {"a": 1, "b": 1}
    assert engine.started == [0]  # the same worker goes on


def test_a_worker_that_cannot_be_reached_costs_no_try():
    answers = {"a": [Unavailable(), Unavailable(), Died("ended"), MADE]}
    engine, folder, _ = dispatched(answers)
    assert folder.tries == {"a": 2}  # the end and the success
    assert engine.started == [0, 0]  # it was replaced at its end alone


def test_a_worker_that_can_never_be_reached_is_replaced():
    engine, folder, _ = dispatched({"a": [Unavailable()] * (RESTS + 1) + [MADE]})
    assert folder.tries == {"a": 1}
    assert engine.started == [0, 0]


def test_a_worker_of_which_some_cannot_be_reached_is_started_anew():
    engine, folder, _ = dispatched({"a": [Unavailable(in_part=True), MADE]})
    assert folder.tries == {"a": 1}  # that was no try
    assert engine.started == [0, 0]


def test_a_worker_that_cannot_be_reached_is_left_alone_for_a_while():
    engine, _, _ = dispatched({"a": [Unavailable(), MADE], "b": [MADE]}, workers=2)
    assert engine.submitted[0] == (0, "a")
    # The other worker has both by then.
    assert engine.submitted[2:] == [(1, "a")]
    assert REST_SECONDS > 1


def test_a_model_that_cannot_be_loaded_ends_it():
    with pytest.raises(UserError, match=r"^no such weights$"):
        dispatched({"a": []}, loads=[NotLoaded("no such weights")])


@pytest.mark.parametrize("make", [Died, Failed])  # Ray's workers outlive an error
def test_workers_that_end_while_they_load_end_it(make):
    killed = make("killed by SIGKILL")
    with pytest.raises(RuntimeError, match="ended while it loaded the model: killed by SIGKILL"):
        dispatched({"a": []}, loads=[killed, killed])
    engine, folder, _ = dispatched({"a": [MADE]}, loads=[killed])
    assert (folder.there, engine.started) == ({"a"}, [0, 0])


def test_a_worker_that_ends_while_it_has_nothing_to_do_is_replaced(monkeypatch):
    wait = Engine.wait

    def waiting(engine, seconds):
        """The second worker, which there is no file for, is killed once."""
        found = wait(engine, seconds)
        if engine.submitted and engine.started == [0, 1]:
            return [(1, Died("killed by SIGKILL")), *found]
        return found

    monkeypatch.setattr(Engine, "wait", waiting)
    engine, folder, _ = dispatched({"a": [Failed("no"), MADE]}, workers=2, tries=2)
    assert engine.started == [0, 1, 1, 0]
    assert folder.tries == {"a": 2}


def test_another_version_of_chipsparse_is_refused():
    with pytest.raises(UserError, match=r"^there has chipsparse 0\.0, and this machine"):
        dispatched({"a": []}, loads=[Loaded("0.0", "there")])


def test_what_another_command_makes_is_left_to_it():
    folder = Folder()

    class Elsewhere(Claims):
        def take(self, digest):
            free = super().take(digest)
            if digest == "a" and self.elsewhere["a"] == 0:
                folder.there.add("a")  # finished there in the meantime
            return free

    claims = Elsewhere({"a": 3, "b": 2})
    engine, _, dispatch = dispatched(
        {"a": [], "b": [MADE], "c": [MADE]}, folder=folder, claims=claims
    )
    # That of b gave it up, and so it is made here.
    assert [name for _, name in engine.submitted] == ["c", "b"]
    assert dispatch.made == {"b", "c"}
    assert folder.there == {"a", "b", "c"}


def test_what_another_command_gave_up_is_given_up():
    folder = Folder()
    folder.given_up = {"a": "ValueError: no", "b": "ValueError: no"}
    # That of b is of an earlier run: nobody has it now.
    engine, _, dispatch = dispatched({"a": [], "b": [MADE]}, folder=folder, claims=Claims({"a": 1}))
    assert [name for _, name in engine.submitted] == ["b"]
    assert dispatch.given_up == {"a"}
    assert "error: a: ValueError: no (tried by another command)" in engine.said


@pytest.mark.parametrize("rank", range(3))
def test_processes_of_a_launcher_begin_with_their_own_share(rank):
    shares = ["adg", "be", "cf"]
    expected = "".join(shares[rank:] + shares[:rank])
    assert "".join(in_turn("abcdefg", Rank(rank, 3))) == expected
    assert in_turn("abc", Rank()) == ["a", "b", "c"]


def live(names, workers, clock):
    group = Group()
    entries = [Entry(name, group=group) for name in names]
    line = LiveLine(entries, workers, console=Console(file=io.StringIO()), clock=clock)
    return line, entries


def test_the_time_left():
    now = 0.0
    line, (a, b, c, d) = live("abcd", 2, lambda: now)
    assert line.seconds_left() is None
    line.began(a)
    line.began(b)
    now = 10.0
    line.ended(a, "made", 10.0)
    line.began(c)
    # b has had its ten seconds, c needs ten and d ten: for two workers.
    assert line.seconds_left() == pytest.approx(10.0)
    now = 14.0
    assert line.seconds_left() == pytest.approx((6 + 10) / 2)
    line.gave_back(b, "again")
    assert line.seconds_left() == pytest.approx((6 + 10 + 10) / 2)
    for each in (b, c, d):
        line.ended(each, "failed")
    assert line.seconds_left() == 0


def test_the_time_left_is_at_least_that_of_the_last_one():
    now = 0.0
    line, (a, b) = live("ab", 8, lambda: now)
    line.ended(a, "made", 16.0)
    line.began(b)
    now = 4.0
    assert line.seconds_left() == pytest.approx(12.0)
