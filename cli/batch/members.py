"""A worker of several processes: their places, and their answers as one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from chipsparse.cli.batch.engine import Answer, Died, Failed, Loaded, Made, Refused, Unavailable
from chipsparse.cli.ranks import Meeting, Rank


@dataclass
class Meetings:
    """Where the processes of each worker meet: a store of this process, at a port that is free."""

    host: str  # by which others reach this process
    _store: object = field(default=None, init=False)
    _met: int = field(default=0, init=False)

    def places(self, count: int, guidance: int | None) -> list[Rank]:
        """The places of the processes of a worker that is started."""
        if count == 1:
            return [Rank()]
        import torch.distributed as dist

        if self._store is None:
            self._store = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
        assert isinstance(self._store, dist.TCPStore)
        self._met += 1
        meeting = Meeting(self.host, self._store.port, f"worker {self._met}")
        return [Rank(rank, count, rank, guidance or 1, meeting=meeting) for rank in range(count)]


@dataclass
class Answers:
    """The answers of a worker's processes to one thing that all of them are asked."""

    count: int
    _given: dict[int, Answer] = field(default_factory=dict, init=False)
    _over: bool = field(default=False, init=False)

    def take(self, member: int, answer: Answer) -> Answer | None:
        """The worker's answer, if this one settles it; what comes behind a failure is ignored."""
        if self._over:
            return None
        self._given[member] = answer
        settled = self._settled(member, answer)
        if settled is not None:
            self._given = {}
            self._over = self.count > 1 and not isinstance(settled, Loaded | Made | Refused)
        return settled

    def _settled(self, member: int, answer: Answer) -> Answer | None:
        if self.count == 1:
            return answer
        place = f"process {member + 1} of {self.count}"
        if isinstance(answer, Died):
            return Died(f"{place}: {answer.sentence}")
        if isinstance(answer, Unavailable):
            return replace(answer, in_part=True)
        # Who failed because of another one waits for that one's own words.
        if isinstance(answer, Failed) and not answer.of_another:
            return Failed(f"{place}: {answer.sentence}")
        if not isinstance(answer, Failed | Loaded | Made | Refused):  # it could not load
            return answer
        if len(self._given) < self.count:
            return None
        answers = [self._given[each] for each in range(self.count)]
        if len({type(each) for each in answers}) == 1:
            return answers[0]
        # Some went on without the others, and must not be used again.
        said = [each.sentence for each in answers if isinstance(each, Refused)]
        said += [each.sentence for each in answers if isinstance(each, Failed)]
        return Failed(said[0])
