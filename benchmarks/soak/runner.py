"""Plays runs on pipelines that live as long as the process, and compares with fresh ones."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.soak.checks import Memory, ProcessState
from benchmarks.soak.choices import Call, Script
from benchmarks.soak.fresh import in_a_fresh_process, reference
from benchmarks.soak.player import Outcome, Player
from benchmarks.soak.subjects import BASE, Place

if TYPE_CHECKING:
    from tests.graph_stand_in import TapeRecorder

PROBE_STEPS = 3


@dataclass
class Findings:
    """What was wrong with one run, one sentence each."""

    differences: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.differences or self.leaks)


class Soak:
    """A process full of pipelines that live as long as it does.

    ``recorder`` captures calls in place of CUDA, where given.
    """

    def __init__(self, place: Place, recorder: TapeRecorder | None = None) -> None:
        self._place, self._recorder = place, recorder
        self._pipes: dict[str, Any] = {}
        self._dense: dict[str, torch.Tensor] = {}
        self._beside: dict[str, list[Outcome]] = {}
        self.memory = Memory(place.device)
        self.replayed = self.struck = 0

    def run(self, script: Script, *, in_process: bool = False) -> Findings:
        """Plays a run and looks at everything; ``in_process``: also at a process of its own."""
        families = [script.family]
        if "beside another" in script.ways:
            families.append(script.beside)
        self.prepare(families)
        found = None
        try:
            found = self._played(script, in_process=in_process)
            if not same_bits(*self._probed(script.family)):
                found.differences.append("dense after disable: other bits than the stock one's")
            found.leaks += self.memory.left(self._living())
            return found
        finally:
            if found is None or found:  # so that the next runs are judged for themselves
                for family in families:
                    self._pipes.pop(family)

    def _played(self, script: Script, *, in_process: bool) -> Findings:
        """Plays a run; what it holds itself is gone when it returns."""
        found, place = Findings(), self._place
        before, dangling = ProcessState.now(place.device), self._dangling()
        player = Player(script, place, self._pipes[script.family], recorder=self._recorder)
        other = None
        with ThreadPoolExecutor() as threads:
            if "beside another" in script.ways:
                other = threads.submit(self.play_beside, script.beside)
            outcomes = player.play()
        found.leaks += before.changes(ProcessState.now(place.device)) + player.left
        if (more := self._dangling() - dangling) > 0:
            found.differences.append(f"{more} launches used memory that nobody held any more")
        self.replayed += sum(outcome.replayed for outcome in outcomes)
        self.struck += sum(outcome.struck for outcome in outcomes)
        found.differences += different(outcomes, reference(script, place))
        if in_process:
            expected = in_a_fresh_process(script, place)
            found.differences += different(outcomes, expected, "a fresh process's")
        if other is not None:
            problems = different(other.result(), self._beside[script.beside])
            found.differences += [f"{script.beside} in another thread: {each}" for each in problems]
        return found

    def _dangling(self) -> int:
        return 0 if self._recorder is None else self._recorder.dangling

    def _probed(self, family: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What the pipeline gives dense, and what a stock one does."""
        return self._probe(self._pipes[family], family), self._dense[family]

    def play_beside(self, family: str) -> list[Outcome]:
        """What a second thread does."""
        pipe, script = self._pipes[family], beside(family)
        return Player(script, self._place, pipe, recorder=self._recorder).play()

    def _living(self) -> list[Any]:
        """What the pipelines hold: schedulers, say, hold other tensors after each call."""
        components = [each for pipe in self._pipes.values() for each in pipe.components.values()]
        modules = [
            module
            for component in components
            if isinstance(component, torch.nn.Module)
            for module in component.modules()
        ]
        holders = [*self._pipes.values(), *components, *modules]
        return pytree.tree_leaves([vars(each) for each in holders if hasattr(each, "__dict__")])

    def prepare(self, families: Iterable[str]) -> None:
        """Makes pipelines that live as long as the process, before anything is measured."""
        missing = [family for family in families if family not in self._pipes]
        for family in missing:
            self._pipes[family] = self._place.make(family)
            if family not in self._dense:
                self._dense[family] = self._probe(self._place.make(family), family)
                self._beside[family] = reference(beside(family), self._place)
            self._probe(self._pipes[family], family, "pt")  # what is made once is made now
            self.play_beside(family)
        self.memory.settle()

    def _probe(self, pipe: Any, family: str, output_type: str = "latent") -> torch.Tensor:
        """A few dense steps of an unpatched pipeline."""
        found: torch.Tensor = pipe(
            **self._place.arguments(family, BASE),
            num_inference_steps=PROBE_STEPS,
            generator=torch.Generator().manual_seed(0),
            output_type=output_type,
            return_dict=False,
        )[0]
        return found


def beside(family: str) -> Script:
    """What a second thread does: a generation of which nothing is changed."""
    call = Call(BASE, 7, 0, 0, True, (), None)
    settings = {
        "attention.block_size_q": 16,
        "mlp.block_size": 16,
        "schedule.refresh_every": 4,
    }
    return Script(0, 0, family, settings, False, ("captured",), (), "", (call,))


def different(
    outcomes: list[Outcome], expected: list[Outcome], whose: str = "the reference's"
) -> list[str]:
    """In what the outcomes of a run's calls are not the reference's, one sentence each."""
    found = []
    for number, (outcome, other) in enumerate(zip(outcomes, expected, strict=True)):
        problems = list(outcome.problems)
        if not outcome.struck:
            if outcome.error != other.error:
                problems.append(f"{outcome.error or 'a result'} instead of {other.error or 'one'}")
            elif not same_bits(outcome.tensors, other.tensors):
                problems.append(f"other bits than {whose}{_distance(outcome, other)}")
            if outcome.facts != other.facts:
                problems.append(f"the report says other things: {_first_other(outcome, other)}")
        found += [f"call {number}: {problem}" for problem in problems]
    return found


def same_bits(tensor: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are equal in all of their bits, NaN included."""
    if tensor is None or other is None:
        return tensor is other
    if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return False
    bits = (each.detach().cpu().contiguous().view(torch.uint8) for each in (tensor, other))
    return torch.equal(*bits)


def _distance(outcome: Outcome, other: Outcome) -> str:
    if outcome.tensors is None or other.tensors is None:
        return ""
    if outcome.tensors.shape != other.tensors.shape:
        return f", {list(outcome.tensors.shape)} instead of {list(other.tensors.shape)}"
    far = (outcome.tensors.cpu().float() - other.tensors.cpu().float()).abs().max().item()
    return f", up to {far:.2g} away"


def _first_other(outcome: Outcome, other: Outcome) -> str:
    pairs = zip(outcome.facts, other.facts, strict=False)
    for found, expected in pairs:
        if found != expected:
            return f"{found} instead of {expected}"[:600]
    return f"{len(outcome.facts)} entries instead of {len(other.facts)}"
