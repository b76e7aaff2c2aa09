"""The schedule of a config: exactly one form says which steps are computed, and how."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from chipsparse.common.validation import REQUIRED, Validated, build, option, shown
from chipsparse.config.actions import ActionName
from chipsparse.config.former_words import check_former_fields

if TYPE_CHECKING:
    from typing import Self

EVERY_BRANCH = "*"
OTHERS: Literal["others"] = "others"

share = partial(option, minimum=0.0, maximum=1.0)


@dataclass(frozen=True, repr=False)
class Spread(Validated):
    """Fractions of the steps that run; the remaining steps are skipped."""

    full: float = share(
        REQUIRED,
        "Compute this fraction of the steps that run in full, above 0. They are close at the "
        "start, further apart in the middle and somewhat closer at the end.",
    )
    sparse: float = share(
        0.0,
        "Compute this fraction sparsely, each step in the middle of the largest skipped interval. "
        "1: all steps but the full ones are sparse.",
    )
    at_least: int = option(
        2,
        "Compute at least this number of steps in full; with no more steps, all are. Of 3 to 8 "
        "steps with sparse ones, only the first, second and fourth are full, never the last.",
        minimum=2,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.full == 0:
            raise ValueError("full: expected a number above 0 and at most 1, got 0")


@dataclass(frozen=True, repr=False)
class Listed(Validated):
    """The numbers of the full and the sparse steps, from 0; the remaining steps are skipped."""

    full: tuple[int, ...] = option(
        REQUIRED,
        "Compute these steps in full, in order, and the first one. A full step before sparse ones "
        "is a refresh.",
        minimum=0,
    )
    sparse: tuple[int, ...] | Literal["others"] = option(
        (),
        "Compute these steps sparsely, in order; others: all but the full ones.",
        minimum=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sparse = () if self.sparse == OTHERS else self.sparse
        for field, steps in (("full", self.full), ("sparse", sparse)):
            if any(step >= later for step, later in itertools.pairwise(steps)):
                raise ValueError(
                    f"{field}: expected steps in order, each of them once, "
                    f"got {shown(list(steps))}",
                )
        both = sorted({0, *self.full} & set(sparse))
        if both:
            raise ValueError(f"sparse: {shown(both)} are computed in full, by full or as the first")


@dataclass(frozen=True, repr=False)
class Periodic(Validated):
    """Full steps at the start and at refreshes; all others are sparse, as first published."""

    warmup: int = option(
        2,
        "Compute this number of first steps in full; the last of them is the first refresh. A "
        "third of them at the end, rounded down, are dense: they remove what sparse steps left.",
        minimum=2,
    )
    refresh_every: int = option(
        10,
        "After the warm-up, one of this number of steps is a refresh.",
        minimum=1,
    )


@dataclass(frozen=True, repr=False)
class Actions(Validated):
    """The action of every step, the last one repeated."""

    each: tuple[ActionName, ...] = option(
        REQUIRED,
        "The first action is dense, and a refresh stands before the first sparse one.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.each[:1] != ("dense",):
            got = f"{shown(self.each[0])} first" if self.each else "an empty list"
            raise ValueError(f"each: the first step must be dense; got {got}")
        first = self.each.index("sparse") if "sparse" in self.each else 0
        if first and "refresh" not in self.each[:first]:
            raise ValueError(
                f"each[{first}]: a sparse step reads what a refresh recorded, and there is none "
                "before it",
            )


@dataclass(frozen=True, repr=False)
class ByCost(Validated):
    """Sparse steps where they are cheap, skipped ones elsewhere.

    The cost is computed from the sizes of the video or image and the rates of an H200.
    """

    mixed: Spread = option(
        REQUIRED,
        "The steps of a generation in which a sparse step costs at most at_most.",
    )
    skipping: Spread = option(
        REQUIRED,
        "The steps of all other generations, none of them sparse.",
    )
    at_most: float = share(
        REQUIRED,
        "Take sparse steps where one is expected to take at most this fraction of a dense step's "
        "time.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixed.sparse == 0:
            raise ValueError("mixed.sparse: expected a number above 0, got 0: no step is sparse")
        if self.skipping.sparse != 0:
            raise ValueError(
                f"skipping.sparse: expected 0, got {self.skipping.sparse:g}: sparse steps cost too "
                "much there",
            )

    def taken(self, sparse_cost: float | None) -> Spread:
        """Return the form for a cost of a sparse step, as a fraction of a dense one.

        None: no layer can be sparse.
        """
        cheap = sparse_cost is not None and sparse_cost <= self.at_most
        return self.mixed if cheap else self.skipping


@dataclass(frozen=True, repr=False)
class Branches(Validated):
    """A form of its own for each guidance branch; skipped steps are corrected where all skip."""

    forms: tuple[tuple[str, BranchForm], ...] = option(
        REQUIRED,
        "The form of each branch, by its name in the report, such as cond, uncond or call1; '*' is "
        "for all others.",
    )

    def __post_init__(self) -> None:
        forms = self.forms
        if not isinstance(forms, (Mapping, tuple, list)):
            raise ValueError(
                f"forms: expected a mapping from branches to forms, got {shown(forms)}",
            )
        by_name = dict(forms)
        for branch, form in by_name.items():
            if not isinstance(branch, str) or not isinstance(form, BRANCH_FORMS):
                names = ", ".join(kind.__name__ for kind in BRANCH_FORMS)
                raise ValueError(f"{branch}: expected one of {names}, got {shown(form)}")
        if EVERY_BRANCH not in by_name:
            raise ValueError(f"{EVERY_BRANCH}: missing, the form of branches without their own")
        object.__setattr__(self, "forms", tuple(sorted(by_name.items())))


BranchForm = Spread | Listed | Periodic | Actions
Form = BranchForm | ByCost | Branches
BRANCH_FORMS = (Spread, Listed, Periodic, Actions)
# By the key that a form has in YAML.
FORMS: Mapping[str, type[Form]] = {
    "spread": Spread,
    "listed": Listed,
    "periodic": Periodic,
    "actions": Actions,
    "by_cost": ByCost,
    "branches": Branches,
}
KEYS = {form: key for key, form in FORMS.items()}


def form_words(form: Form) -> dict[str, Any]:
    """Return a form as plain values under its key, as YAML has it."""
    key = KEYS[type(form)]
    if isinstance(form, Actions):
        return {key: list(form.each)}
    if isinstance(form, Branches):
        return {key: {branch: form_words(own) for branch, own in form.forms}}
    return {key: form.words()}


def read_form(words: Mapping[str, Any]) -> Form:
    """Return the form of plain values under its key, or of a form under it.

    Raises:
        ValueError: for two forms, or fields that a form does not have.
    """
    key, *others = [key for key in FORMS if key in words]
    if others:
        raise ValueError(f"{others[0]}: a schedule has one form, and there is {key} already")
    value = words[key]
    kind = FORMS[key]
    if isinstance(value, kind):
        return value
    if kind is Branches:
        return _read_branches(value)
    if kind is Actions:
        try:
            return Actions(value)
        except ValueError as error:
            raise ValueError(f"{key}{str(error).removeprefix('each')}") from None
    return build(kind, value, key)


def _read_branches(words: object) -> Branches:
    if not isinstance(words, Mapping):
        raise ValueError(f"branches: expected a mapping from branches to forms, got {shown(words)}")
    try:
        forms = {branch: _read_branch(branch, own) for branch, own in words.items()}
        return Branches(tuple(forms.items()))
    except ValueError as error:
        raise ValueError(f"branches.{error}") from None


def _read_branch(branch: str, words: object) -> BranchForm:
    """Return the form of one branch, which is none that has others within."""
    if isinstance(words, BRANCH_FORMS):
        return words
    allowed = ", ".join(KEYS[kind] for kind in BRANCH_FORMS)
    if not isinstance(words, Mapping):
        raise ValueError(f"{branch}: expected one form of {allowed}, got {shown(words)}")
    for name in words:
        if FORMS.get(name) not in BRANCH_FORMS:
            raise ValueError(f"{branch}.{name}: unknown form; allowed: {allowed}")
    if not words:
        raise ValueError(f"{branch}: expected one form of {allowed}, got none")
    try:
        form = read_form(words)
    except ValueError as error:
        raise ValueError(f"{branch}.{error}") from None
    assert isinstance(form, BRANCH_FORMS)
    return form


@dataclass(frozen=True, repr=False)
class ScheduleConfig(Validated):
    """The denoising steps that are computed in full, refreshed, sparse or skipped.

    A schedule has exactly one form, under its key. The first step is always dense.
    """

    form: Form = option(Periodic(), "Which steps are computed, and how; one of the groups below.")
    forecast: float = share(
        0.0,
        "A skipped step continues the line through the last two computed outputs by this fraction "
        "of their difference; 0: it gives the last one again.",
    )
    forecast_after: float = share(
        0.0,
        "Forecast only after this fraction of the steps. Higher is safer, and a little less exact.",
    )
    correct: bool = option(
        True,
        "Once the next full step is known, add to the latents what skipped steps would have "
        "changed with predictions on the line between both full ones. It takes no call of the "
        "model, and needs a scheduler of flow matching.",
    )

    OWN: ClassVar[tuple[str, ...]] = ("forecast", "forecast_after", "correct")

    def __post_init__(self) -> None:
        form = self.form
        if not isinstance(form, tuple(KEYS)):
            names = ", ".join(kind.__name__ for kind in KEYS)
            raise ValueError(f"form: expected one of {names}, got {shown(form)}")
        super().__post_init__()

    def words(self) -> dict[str, Any]:
        """Return plain values, with the form under its key."""
        return {**form_words(self.form), **{name: getattr(self, name) for name in self.OWN}}

    @classmethod
    def check_former_names(cls, words: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a schedule in former words, with the same in the new ones."""
        check_former_fields(words)

    @classmethod
    def read(cls, words: Mapping[str, Any]) -> Self:
        """Return the schedule of plain values; without a form it is `Periodic`."""
        cls.check_former_names(words)
        allowed = (*FORMS, *cls.OWN)
        for name in words:
            if name not in allowed:
                raise ValueError(f"{name}: unknown field; allowed: {', '.join(allowed)}")
        own = {name: words[name] for name in cls.OWN if name in words}
        if not FORMS.keys().isdisjoint(words):
            own["form"] = read_form({key: words[key] for key in FORMS if key in words})
        return cls(**own)
