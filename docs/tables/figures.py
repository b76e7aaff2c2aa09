"""``python -m docs.tables.figures KIND RECORDS... -o FIGURE``: figures from records alone.

Kinds: ``curve`` (speed-up over the keep fraction, time over the tokens), ``parts`` (where a sparse
step's time goes), ``photographs`` (quality over the speed-up, on moving photographs) and ``frames``
(some frames of those, of three ways).
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.ticker import LogLocator

from benchmarks.curves import DENSE, OURS, SKIPS, by_workload, decibels, generation_of, qualities
from benchmarks.moving_photographs.evaluate import (
    PUBLISHED,
    QUALITIES,
    known_prices,
    made_in_all_ways,
    name_of,
    of_qualities,
    picture_name,
    rows_of,
)
from benchmarks.prices import priced
from benchmarks.records import Record, read
from benchmarks.step_timing import PARTS

# Okabe and Ito's colours, which most colour-blind readers tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#b4b4b4")
NOTE = "#666666"
IDEAL = "#8a8a8a"
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.12,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "font.size": 10,
    "grid.color": "#e4e4e4",
}
METHODS = {
    OURS: "#0072b2",
    SKIPS: "#56b4e9",
    "SeaCache": "#8b1a1a",
    "TaylorSeer": "#e69f00",
    "MagCache": "#cc79a7",
    "fewer steps": "#888888",
}
SPEEDUPS = (1.5, 2, 2.5, 3, 3.6, 4, 5, 6, 7, 8)  # marks of an axis, and its ends
FRAMES_QUALITY = "fast"
LEAST_LABEL = 0.025  # of a bar: what a share needs to be written on it


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws a figure of the docs from records."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=DRAWN)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True, help=".png or .webp")
    parser.add_argument("--pictures", type=Path, help="of frames: what photographs --pictures made")
    parser.add_argument("--clip", type=int, help="of frames: its number; default: the median lead")
    args = parser.parse_args(arguments)
    if (args.kind == "frames") != (args.pictures is not None):
        parser.error("frames needs --pictures, and no other figure takes it")
    records = read(*args.records)
    options = {"lossless": args.kind != "frames", "quality": 80}
    if args.kind in ("photographs", "frames"):
        records = priced(records, known_prices())
    of_frames = {"pictures": args.pictures, "clip": args.clip} if args.kind == "frames" else {}
    figure = DRAWN[args.kind](records, **of_frames)
    figure.savefig(args.output, pil_kwargs=options if args.output.suffix == ".webp" else {})


@matplotlib.rc_context(STYLE)
def curve(records: Sequence[Record]) -> Figure:
    """Speed-up over dense against the share of kept columns, and milliseconds per head by tokens.

    Raises:
        ValueError: no record belongs to a curve.
    """
    panels = [
        (panel, of_it)
        for name, panel in {"keep": _keep_panel, "tokens": _tokens_panel}.items()
        if (of_it := [record for record in records if record.get("curve") == name])
    ]
    if not panels:
        raise ValueError("no records of a curve")
    figure = Figure((12, 5))
    for place, (panel, of_it) in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), place)
        axes.set(xscale="log", yscale="log")
        panel(axes, of_it)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid()
        axes.legend()
    one = panels[0][1][0]
    text = "{device}, torch {torch}, {dtype}, head size {head_dim}, blocks of {block_size} rows, "
    figure.supxlabel((text + "backend {backend}").format(**one), color=NOTE, fontsize=9)
    return figure


def _keep_panel(axes: Axes, records: Sequence[Record]) -> None:
    of_case: dict[str, list[Record]] = {}
    for record in records:
        of_case.setdefault(f"{record['tokens']:,} tokens", []).append(record)
    for (label, of_it), colour in zip(of_case.items(), COLOURS, strict=False):
        _line(axes, of_it, "density", "speedup", label, colour)
    ideal = sorted({record["density"]: record["ideal"] for record in records}.items())
    axes.plot(*zip(*ideal, strict=True), "--", color=IDEAL, label="possible, 1 / kept share")
    # Lists have whole lengths: shares of several cases that round alike are one tick.
    ticks = {f"{100 * keep:.0f}": keep for keep, _ in ideal}
    axes.set_xticks([*ticks.values()], [*ticks])
    axes.set(title="Speed-up over the fastest dense attention", xlabel="kept columns, %")


def _tokens_panel(axes: Axes, records: Sequence[Record]) -> None:
    """Per head, since long cases have fewer heads."""
    times = ("latency_ms", "baseline_ms")
    records = [r | {n: r[n] / (r["batch"] * r["heads"]) for n in times} for r in records]
    baseline = ", ".join(sorted({record["baseline"] for record in records}))
    keep = ", ".join(sorted({f"{record['density']:.0%}" for record in records}))
    _line(axes, records, "tokens", "baseline_ms", baseline, COLOURS[1])
    _line(axes, records, "tokens", "latency_ms", f"sparse, {keep} kept", COLOURS[0])
    tokens = sorted({record["tokens"] for record in records})
    axes.set_xticks(tokens, [f"{n / 1000:.0f}k" if n >= 1000 else str(n) for n in tokens])
    axes.set(title="Milliseconds per head", xlabel="tokens")


def _line(axes: Axes, records: Sequence[Record], x: str, y: str, label: str, colour: str) -> None:
    points = sorted((record[x], record[y]) for record in records)
    axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label)


@matplotlib.rc_context(STYLE)
def parts(records: Sequence[Record]) -> Figure:
    """One bar per record with a ``breakdown_ms``, as long as its part of the model's longest.

    Numbers in it are shares of its own step. Bars of one model stand together, each named by the
    ``when`` of its record.
    """
    # Schedules of a case have the same sparse step.
    bars = {(r["case"], r.get("when", "")): r for r in records if r.get("breakdown_ms")}
    cases = list(dict.fromkeys(case for case, _ in bars))
    records = sorted(bars.values(), key=lambda record: cases.index(record["case"]))
    figure = Figure((12, 1.3 + 0.5 * len(records)))
    axes = figure.add_subplot()
    labels = [
        f"{', '.join(filter(None, (r['case'], r.get('when'))))}\n"
        f"{r['breakdown_ms']['all']:.0f} ms, {r['step_speedup']:.1f}x stock"
        for r in records
    ]
    wholes = [sum(r["breakdown_ms"][part] for part in PARTS) or 1.0 for r in records]
    longest = {
        case: max(whole for r, whole in zip(records, wholes, strict=True) if r["case"] == case)
        for case in cases
    }
    lefts = [0.0] * len(records)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        times = [r["breakdown_ms"][part] for r in records]
        widths = [time / longest[r["case"]] for time, r in zip(times, records, strict=True)]
        drawn = axes.barh(labels, widths, 0.62, lefts, color=colour, label=part)
        shares = [time / whole for time, whole in zip(times, wholes, strict=True)]
        texts = [f"{share:.0%}" if share > LEAST_LABEL else "" for share in shares]
        ink = "black" if part in ("idle", "elementwise") else "white"
        axes.bar_label(drawn, texts, label_type="center", color=ink)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title = "One sparse step of a transformer (one guidance branch), by part"
    if len(cases) < len(records):
        title += "; bars of one model to scale"
    options: dict[str, Any] = {"loc": "outside upper center", "frameon": False}
    figure.legend(title=title, title_fontsize=12, ncols=len(PARTS), **options)
    if records:
        text = "{device}, torch {torch}, {dtype}, compiled blocks"
        figure.supxlabel(text.format(**records[0]), color=NOTE, fontsize=9)
    return figure


@matplotlib.rc_context(STYLE)
def photographs(records: Sequence[Record]) -> Figure:
    """Mean PSNR over the speed-up: all settings as points, and a line through each method's best.

    A line has the values of the table at equal cost, or that of a faster setting where it is
    better, from the method's slowest setting on. Hollow marks are published figures. Each size has
    a panel of its own.

    Raises:
        ValueError: there is no record.
    """
    panels = by_workload(records)
    if not panels:
        raise ValueError("no records of moving photographs")
    figure = Figure((8.4 * len(panels), 4.8))
    for place, clips in enumerate(panels.values(), 1):
        axes = figure.add_subplot(1, len(panels), place)
        _photographs_panel(axes, made_in_all_ways(clips))
        axes.set_title(generation_of(clips[0]), color=NOTE, fontsize=9)
    return figure


def _photographs_panel(axes: Axes, clips: Sequence[Record]) -> None:
    first = SPEEDUPS[0]
    last = SPEEDUPS[-1]
    clips = of_qualities(clips)
    rows = [row for row in rows_of(clips) if first <= row["speedup"] <= last]
    grid = [first * (last / first) ** (place / 100) for place in range(101)]
    at_speedup = {speedup: qualities(clips, 1 / speedup) for speedup in grid}
    for method, colour in METHODS.items():
        points = [(row["speedup"], row["psnr"]) for row in rows if row["method"] == method]
        speedups = [x for x, at in at_speedup.items() if method in at]
        values = (at_speedup[x][method].mean for x in reversed(speedups))
        line = zip(speedups, reversed([*accumulate(values, max)]), strict=True)
        style: dict[str, Any] = {"color": colour, "zorder": 3 if method == OURS else 2}
        axes.plot(*_columns(points), ".", alpha=0.3, **style)
        axes.plot(*_columns(line), lw=2.8 if method == OURS else 1.6, label=method, **style)
        published = PUBLISHED.get(method, {}).items()
        axes.plot(*_columns(published), "D", markerfacecolor="white", **style)
    axes.plot([], [], "D", color=NOTE, markerfacecolor="white", label="published for HunyuanVideo")
    axes.set(xscale="log", xlabel="speed-up", ylabel="PSNR to the dense clip, dB")
    axes.set_xticks(SPEEDUPS, [f"{speedup:g}x" for speedup in SPEEDUPS])
    axes.minorticks_off()
    axes.grid()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


@matplotlib.rc_context(STYLE)
def frames(records: Sequence[Record], pictures: Path, clip: int | None = None) -> Figure:
    """Frames of one clip, in a row for each of dense, ours at `FRAMES_QUALITY` and MagCache.

    MagCache has its fastest setting that is no faster than ours, if there is one.

    Args:
        records: priced clips.
        pictures: the folder of their frames.
        clip: its number; by default the clip of the median lead.

    Raises:
        ValueError: no clip has pictures of all three.
    """
    clips = made_in_all_ways(records)
    seeds = {clip["seed"] for clip in clips}

    def shown(seed: int, way: str) -> bool:
        return (pictures / picture_name(seed, way)).is_file()

    rows = [row for row in rows_of(clips) if any(shown(seed, name_of(row)) for seed in seeds)]
    known = {row["method"] for row in rows} & {"MagCache"}
    known |= {row["setting"] for row in rows if row["variant"] == QUALITIES}
    if not known >= {"MagCache", FRAMES_QUALITY}:
        raise ValueError(f"{pictures} has no pictures of MagCache and of {FRAMES_QUALITY}")
    named = (QUALITIES, FRAMES_QUALITY)
    ours = next(row for row in rows if (row["variant"], row["setting"]) == named)
    others = [row for row in rows if row["method"] == "MagCache"]
    slower = [row for row in others if row["speedup"] <= ours["speedup"]]
    other = min(slower or others, key=lambda row: abs(row["speedup"] - ours["speedup"]))
    ways = (DENSE, name_of(ours), name_of(other))
    psnr = {(clip["seed"], name_of(clip)): decibels(clip) for clip in clips}
    leads = sorted(
        (psnr[seed, ways[1]] - psnr[seed, ways[2]], seed)
        for seed in seeds
        if all(shown(seed, way) for way in ways) and clip in (None, seed)
    )
    if not leads:
        raise ValueError(f"{pictures} has no clip's pictures of {'; '.join(ways)}")
    _, seed = leads[len(leads) // 2]
    titles = ["dense"]
    for name, row in (("chipsparse", ours), ("MagCache", other)):
        titles.append(f"{name}, {row['speedup']:.1f}x: {psnr[seed, name_of(row)]:.1f} dB")
    figure = Figure((10.4, 8.6))
    for place, (title, way) in enumerate(zip(titles, ways, strict=True), 1):
        axes = figure.add_subplot(len(ways), 1, place)
        axes.imshow(imread(pictures / picture_name(seed, way)))
        axes.set_axis_off()
        axes.set_title(title, loc="left")
    return figure


def _columns(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    pairs = list(points)
    return [x for x, _ in pairs], [y for _, y in pairs]


DRAWN: dict[str, Callable[..., Figure]] = {
    "curve": curve,
    "parts": parts,
    "photographs": photographs,
    "frames": frames,
}

if __name__ == "__main__":
    main()
