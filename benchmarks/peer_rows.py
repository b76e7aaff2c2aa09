"""What `peers` compares: chipsparse, a static window, diffusers' caches, and both on one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peer_caches import COUNTING_METHODS, caches, stackable
from benchmarks.peers_table import DENSE
from benchmarks.static_window import WindowSession
from chipsparse.config import SparsityConfig
from chipsparse.pipelines.diffusers_caches import Cache
from chipsparse.session import Session

# Shares of the steps, those of the bundled models' profiles.
WARM_UP, FINAL, REFRESHES = 0.16, 0.06, (0.28, 0.46, 0.7)
SKIPS = (0, 1, 3)
KEEP_FRACTIONS = (0.1, 0.3)
# Of steps that are computed in full or skipped: those at the start (of 30), and every how many-th.
STRIDES = ((0.2, 2), (0.16, 4), (0.16, 8))
THRESHOLDS = ((0.03, 3), (0.1, 3), (0.3, 8))
NOTHING_SPARSE = {"attention.enabled": False, "mlp.enabled": False}
ATTENTION_ALONE = {"mlp.enabled": False}


@dataclass(frozen=True)
class Row:
    """One way to generate.

    Attributes:
        method: what stands for one curve.
        setting: a point of it.
        config: what chipsparse computes; None for the stock model.
        cache: of diffusers, on top.
        session: what the config runs with.
    """

    method: str
    setting: str
    config: SparsityConfig | None = None
    cache: Cache | None = None
    session: type[Session] = Session


def rows(base: SparsityConfig, steps: int, *, video: bool) -> list[Row]:
    """All of them; the first is dense.

    Args:
        base: the model's profile, whose columns, neurons and token order are taken.
        steps: denoising steps; schedules are laid out anew for so many.
        video: whether the model makes videos.
    """
    return [
        Row(DENSE, "again"),
        *_sparse(base, steps),
        *_skipped(base, steps),
        *_attention(base, steps),
        *(Row(each.method, each.setting, cache=each) for each in caches(video=video)),
        *_stacked(base, steps, stackable(video=video)),
    ]


def _sparse(base: SparsityConfig, steps: int) -> Iterator[Row]:
    for skips in SKIPS:
        yield Row("chipsparse", f"{skips} skipped in a row", scheduled(base, steps, skips))


def _skipped(base: SparsityConfig, steps: int) -> Iterator[Row]:
    """Nothing sparse: what the tuner finds for these models, and the threshold."""
    for share, stride in STRIDES:
        first = max(2, round(share * steps))
        computed = range(first - 1 + stride, steps - 1, stride)
        changes = {
            "schedule.warmup_steps": first,
            "schedule.final_dense_steps": 1,
            "schedule.refresh_steps": (),
            "schedule.skip_steps": tuple(sorted({*range(first, steps - 1)} - {*computed})),
        }
        yield Row(
            "chipsparse, skips alone",
            f"{first} steps, then one of {stride}",
            scheduled(base, steps, 0).override({**changes, **NOTHING_SPARSE}),
        )
    for threshold, most in THRESHOLDS:
        changes = {
            "schedule.refresh_steps": (),
            "schedule.skip_threshold": threshold,
            "schedule.max_skips": most,
        }
        yield Row(
            "chipsparse, skip_threshold alone",
            f"{threshold:g}, at most {most}",
            scheduled(base, steps, 0).override({**changes, **NOTHING_SPARSE}),
        )


def _attention(base: SparsityConfig, steps: int) -> Iterator[Row]:
    """Attention alone, no step skipped: columns that were chosen and columns that lie near."""
    exact = scheduled(base, steps, 0).override(ATTENTION_ALONE)

    def kept(share: float, **changes: Any) -> SparsityConfig:
        return exact.override({"attention.keep_fraction": share, **changes})

    no_cache: dict[str, Any] = {"attention.delta_rule": "kept_only"}
    # A window needs no sums of columns: refreshes after the first are plain dense steps.
    window = {"schedule.reselect": False}
    for share in KEEP_FRACTIONS:
        text = f"{share:.0%} of the columns"
        yield Row("chipsparse, attention alone", text, kept(share))
        yield Row("static window", text, kept(share, **no_cache, **window), session=WindowSession)
    least = KEEP_FRACTIONS[0]
    text = f"{least:.0%} of the columns"
    never = {"schedule.refresh_steps": (), "schedule.final_dense_steps": 0}
    yield Row(
        "static window, dense at the start alone",
        text,
        kept(least, **no_cache, **window, **never),
        session=WindowSession,
    )
    yield Row("chosen columns without cache", text, kept(least, **no_cache))
    yield Row(
        "static window with chipsparse's cache",
        text,
        kept(least, **window),
        session=WindowSession,
    )


def _stacked(base: SparsityConfig, steps: int, stack: Sequence[Cache]) -> Iterator[Row]:
    """Caches on sparse steps; on skipped ones, too, unless they count steps and are refused."""
    for cache in stack:
        skips = 0 if cache.method in COUNTING_METHODS else 1
        yield Row(
            f"chipsparse + {cache.method}",
            f"{skips} skipped in a row, {cache.setting}",
            scheduled(base, steps, skips),
            cache,
        )
    refused = next(cache for cache in stack if cache.method in COUNTING_METHODS)
    yield Row(
        f"chipsparse + {refused.method}",
        f"1 skipped in a row, {refused.setting}",
        scheduled(base, steps, 1),
        refused,
    )


def scheduled(base: SparsityConfig, steps: int, skips: int) -> SparsityConfig:
    """The profile with a schedule of its kind for so many steps.

    Args:
        base: the profile.
        steps: denoising steps.
        skips: how many steps are skipped behind each one that is computed, refreshes apart.
    """
    first, final = max(2, round(WARM_UP * steps)), round(FINAL * steps)
    refreshes = {round(share * steps) for share in REFRESHES}
    skipped: list[int] = []
    behind = 0
    for step in range(first, steps - final):
        if step in refreshes or behind == skips:
            behind = 0
        else:
            skipped.append(step)
            behind += 1
    return base.override(
        {
            "schedule.warmup_steps": first,
            "schedule.final_dense_steps": final,
            "schedule.refresh_steps": tuple(sorted(refreshes)),
            "schedule.dense_steps": (),
            "schedule.skip_steps": tuple(skipped),
            "schedule.skip_threshold": None,
            "schedule.actions": None,
        }
    )
