"""What happens in one run of the soak, drawn from the seed and the run's number alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.soak.subjects import (
    BASE,
    FAMILIES,
    GUIDED_BY_STEP,
    SHARES,
    WITHOUT_CACHES_ON_TOP,
    WITHOUT_CALLBACKS,
)
from chipsparse.config import PUBLISHED_FORM

Choice = TypeVar("Choice")

# What a call's result must not depend on: the reference does without.
WAYS = {
    "captured": 0.6,
    "one handle": 0.6,
    "caches on the host": 0.25,
    "model offload": 0.2,
    "inference mode": 0.1,
    "layer times": 0.08,
    "beside another": 0.15,
    "undone while enabled": 0.4,
}
# What it does depend on, for all calls of the run: at most one of each line.
SURROUNDINGS = (
    {"bfloat16": 0.1, "autocast": 0.06},
    {"group offload": 0.06, "sequential offload": 0.05, "compiled blocks": 0.02},
)
# Changes before a call and between its steps; see `changes`. The others happen before calls alone.
BETWEEN_STEPS = {
    "LoRA": 5,
    "weights": 3,
    "hook": 2,
    "processor": 2,
    "guidance": 3,
    "prompt": 2,
    "interrupt": 1,
    "preview": 3,
    "report read": 2,
}
BEFORE_CALLS = {"LoRA": 4, "weights": 2, "hook": 2, "processor": 1, "cache on top": 1, "dtype": 1}
# Those that a result must not depend on.
HARMLESS = ("preview", "report read")
FAULTS = ("error", "Ctrl-C", "out of memory")
# Operations of a tiny transformer's call and some more: where among them a fault strikes.
MOST_OPERATIONS = 1500


@dataclass(frozen=True)
class Event:
    """A change.

    Attributes:
        name: see `changes`.
        step: after which step of the call; None: before the call.
        seed: of what it chooses itself.
    """

    name: str
    step: int | None
    seed: int


@dataclass(frozen=True)
class Fault:
    """An exception that ends a call.

    Attributes:
        name: which one.
        step: after which step; -1: from the start of the call.
        after: so many tensor operations later; None: raised by the user's own callback.
    """

    name: str
    step: int
    after: int | None


@dataclass(frozen=True)
class Call:
    """One call of the pipeline, which makes one generation.

    Attributes:
        variant: of the family's calls.
        steps: denoising steps.
        seed: of the noise.
        prompt: which prompt, where the family's call has one as text.
        decode: whether the latents are decoded.
        events: what changes before and during it, in order.
        fault: what ends it early, or None.
    """

    variant: str
    steps: int
    seed: int
    prompt: int
    decode: bool
    events: tuple[Event, ...]
    fault: Fault | None


@dataclass(frozen=True)
class Script:
    """All of one run: calls of one pipeline, and how they are made.

    Attributes:
        number: of the run.
        seed: of the soak.
        family: of the pipeline.
        settings: overrides of the config, by dotted path.
        strict: as of `chipsparse.enable`.
        ways: of `WAYS`, those that it goes.
        surroundings: likewise of `SURROUNDINGS`.
        beside: the family that generates in a second thread, where that is one of the ways.
        calls: the generations.
    """

    number: int
    seed: int
    family: str
    settings: dict[str, Any] = field(hash=False)
    strict: bool
    ways: tuple[str, ...]
    surroundings: tuple[str, ...]
    beside: str
    calls: tuple[Call, ...]

    def kinds(self) -> Counter[str]:
        """How often each kind of change occurs."""
        events = [event.name for call in self.calls for event in call.events]
        faults = [call.fault.name for call in self.calls if call.fault is not None]
        return Counter([self.family, *self.ways, *self.surroundings, *events, *faults])

    def lines(self) -> list[str]:
        """What happens, one line each."""
        lines = [
            f"{self.family}, {', '.join(self.ways + self.surroundings) or 'as usual'}"
            + (f" ({self.beside})" if "beside another" in self.ways else ""),
            ", ".join(f"{path}={value}" for path, value in self.settings.items()),
        ]
        if self.strict:
            lines.append("strict")
        for call in self.calls:
            lines.append(
                f"call: {call.variant or 'base'}, {call.steps} steps, seed {call.seed}, prompt "
                f"{call.prompt}" + (", decoded" if call.decode else "")
            )
            lines += [
                f"  {'before' if event.step is None else f'after step {event.step}'}: "
                f"{event.name} {event.seed}"
                for event in call.events
            ]
            if call.fault is not None:
                where = "" if call.fault.after is None else f" and {call.fault.after} operations"
                lines.append(f"  {call.fault.name} after step {call.fault.step}{where}")
        return lines


def choose(seed: int, number: int, family: str | None = None) -> Script:
    """Draws a run, of a family at random where none is given."""
    draw = random.Random(f"{seed} {number}")
    drawn = _one(draw, SHARES)
    family = family or drawn
    surroundings = tuple(name for each in SURROUNDINGS for name in _some(draw, each)[:1])
    # Compiled code cannot be looked at, so that nothing can strike within.
    count, looked_at = draw.choice((1, 1, 2, 2, 3)), "compiled blocks" not in surroundings
    ways, fixed = _some(draw, WAYS), []
    if "sequential offload" in surroundings:  # weights are elsewhere until they are called
        fixed += ["LoRA", "weights", "dtype"]
    if "inference mode" in ways:  # in which nothing can be made that has a gradient outside
        fixed += ["LoRA"]
        if "autocast" in surroundings:  # stock pipelines, too, go on with casts of the old ones
            fixed += ["weights"]
    if family in WITHOUT_CACHES_ON_TOP:
        fixed += ["cache on top"]
    calls = tuple(_call(draw, family, fixed, looked_at=looked_at) for _ in range(count))
    return Script(
        number,
        seed,
        family,
        _settings(draw),
        draw.random() < 0.08,
        ways,
        surroundings,
        draw.choice([name for name in SHARES if name != family]),
        calls,
    )


def _call(draw: random.Random, family: str, fixed: Collection[str], *, looked_at: bool) -> Call:
    steps, events = draw.randint(5, 9), []
    between = {
        name: share
        for name, share in BETWEEN_STEPS.items()
        if name != "guidance" or family in GUIDED_BY_STEP
    }
    has_callbacks = family not in WITHOUT_CALLBACKS
    if draw.random() < 0.35:
        events.append(Event(_one(draw, BEFORE_CALLS), None, draw.randrange(1000)))
    for _ in range(draw.choice((0, 0, 1, 1, 2, 3)) if has_callbacks else 0):
        step = draw.randrange(1, steps - 1)
        events.append(Event(_one(draw, between), step, draw.randrange(1000)))
    events = [event for event in events if event.name not in fixed]
    fault = None
    if draw.random() < 0.25 and (has_callbacks or looked_at):
        inside = looked_at and (not has_callbacks or draw.random() < 0.75)
        after = draw.randrange(MOST_OPERATIONS) if inside else None
        step = draw.randrange(-1 if inside else 0, steps - 1) if has_callbacks else -1
        fault = Fault(draw.choice(FAULTS), step, after)
        # What it leaves of a change is its own matter: other calls begin as if it had not been.
        events = [event for event in events if event.name in HARMLESS]
    variants = [BASE, BASE, *FAMILIES[family].variants]
    return Call(
        draw.choice(variants),
        steps,
        draw.randrange(3),
        draw.randrange(3),
        draw.random() < 0.25,
        tuple(sorted(events, key=lambda event: -1 if event.step is None else event.step)),
        fault,
    )


def _settings(draw: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "attention.density": draw.choice((0.1, 0.25, 0.5)),
        "attention.random_fraction": draw.choice((0.0, 0.05)),
        "attention.block_size_q": draw.choice((16, 16, 32)),
        "attention.delta_rule": draw.choice(("merge", "merge", "difference")),
        "mlp.density": draw.choice((0.1, 0.3)),
        "mlp.block_size": draw.choice((16, 16, 32)),
        "schedule.refresh_every": draw.choice((3, 4, 4, 6)),
        "tile": draw.choice(([2, 2, 2], [1, 4, 4], None)),
        "seed": draw.randrange(4),
    }
    rare: dict[str, tuple[Any, ...]] = {
        "attention.enabled": (False,),
        "mlp.enabled": (False,),
        "schedule.actions": (["dense", "refresh", "sparse", "skip", "sparse"],),
        "schedule.warmup_steps": (3, 6),
        "schedule.forecast": (0.5, 1.0),
        "schedule.first_dense_layers": (1,),
        "layers": ([{"layers": "0", "attention": "dense", "mlp": 0.5}],),
        "memory.ram": ("0", "64K", "1M"),
        "memory.residuals": ("full", "fp8"),
        "memory.activations": ("full", "fp8"),
    }
    for path, values in rare.items():
        value = draw.choice(values)
        if draw.random() < 0.1:
            settings[path] = value
    if draw.random() < 0.3:
        return {**_of_any_form(settings), **_list(draw)}
    return settings


def _of_any_form(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that a schedule with a list of full steps has no use for."""
    published = {f"schedule.{name}" for name in PUBLISHED_FORM}
    return {path: value for path, value in settings.items() if path not in published}


def _list(draw: random.Random) -> dict[str, Any]:
    full: dict[str, Any] = draw.choice(
        (
            {"full_share": 0.5},
            {"full_share": 0.6, "least_full": 3},
            {"full_steps": [0, 1, 4]},
        )
    )
    between = draw.choice(("none", "middle", "middle", "every_other", "all"))
    return {f"schedule.{name}": value for name, value in {**full, "between": between}.items()}


def _one(draw: random.Random, weights: dict[Choice, int]) -> Choice:
    return draw.choices(list(weights), list(weights.values()))[0]


def _some(draw: random.Random, chances: dict[str, float]) -> tuple[str, ...]:
    return tuple(name for name, chance in chances.items() if draw.random() < chance)
