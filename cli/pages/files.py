"""What the page says of two files: of what `chipsparse compare` prints of them with ``--json``."""

from __future__ import annotations

from collections.abc import Mapping

from chipsparse.cli.pages.elements import Element
from chipsparse.cli.pages.frame_curves import (
    METRICS,
    PIXEL_SCALE,
    Curve,
    Curves,
    curves_figure,
    read_curves,
)
from chipsparse.cli.pages.json_values import Values
from chipsparse.cli.pages.names import name_of
from chipsparse.cli.pages.part import Missing, Part, Section, Tile, folded, table
from chipsparse.cli.pages.units import TIMES, decibels

CURVES = ("psnr_db", "ssim", "lpips")


def files_part(values: Values) -> Part:
    """The part of the page; raises `UserError` where the file is damaged."""
    curves = read_curves(values.objects("per_frame"))
    a, b = (name_of(values.text(name)) for name in ("a", "b"))
    figures = [curves_figure(metric, [Curves("B against A", [curves])]) for metric in CURVES]
    flicker = [
        Curves(f"{side}: {name}", [{"flicker": curves[f"flicker_{side.lower()}"]}])
        for side, name in (("A", a), ("B", b))
        if f"flicker_{side.lower()}" in curves
    ]
    figures.append(curves_figure("flicker", flicker))
    body = [each for each in figures if each is not None]
    sections, missing = [], []
    if body:
        body.append(folded("All frames as a table", _frames_table(curves)))
        text = (
            "How close each frame of B is to that of A. Flicker is how much a frame differs from "
            "the mean of its neighbours. A gap in a curve of PSNR is a frame that is the same."
        )
        sections.append(Section("Frame by frame", text, body))
    else:
        why = (
            "Every frame is the same."
            if values.flag("identical")
            else "These are images, of one frame each."
        )
        missing.append(Missing("Frame by frame", why))
    return Part(
        kind="files",
        source=values.file.name,
        title=f"{b} against {a}",
        facts=_facts(values),
        tiles=_tiles(values),
        sections=sections,
        missing=missing,
    )


def _facts(values: Values) -> list[tuple[str, str]]:
    size = f"{values.count('width')}{TIMES}{values.count('height')} pixels"
    return [
        ("A, the reference", name_of(values.text("a"))),
        ("B", name_of(values.text("b"))),
        ("picture", f"{size}, {values.count('frames')} frames"),
        ("lossy", ", ".join(map(name_of, values.texts("lossy")))),
        ("LPIPS", values.text_or_none("lpips_missing") or ""),
        ("versions", f"chipsparse {values.text('chipsparse')}"),
    ]


def _tiles(values: Values) -> list[Tile]:
    tiles = [Tile(decibels(values.number_or_none("psnr_db")), "PSNR of B against A")]
    for name, label in (("ssim", "SSIM"), ("lpips", "LPIPS")):
        value = values.number_or_none(name)
        if value is not None:
            tiles.append(Tile(f"{value:.4f}", label))
    largest = values.number_or_none("largest_difference")
    if largest is not None:
        tiles.append(Tile(f"{largest:g}", "largest difference, of 255"))
    change = values.number_or_none("flicker_change")
    if change is not None:
        tiles.append(Tile(f"{PIXEL_SCALE * change:+.3f}", "flicker, B - A, of 255"))
    return tiles


def _frames_table(curves: Mapping[str, Curve]) -> Element:
    names = [name for name in METRICS if any(value is not None for value in curves.get(name, ()))]
    count = max(len(curve) for curve in curves.values())
    rows = (
        (str(frame), *(_cell(curves[name][frame], METRICS[name][2]) for name in names))
        for frame in range(count)
    )
    return table(("frame", *(METRICS[name][1] for name in names)), rows)


def _cell(value: float | None, scale: float) -> str:
    return "" if value is None else f"{scale * value:.4g}"
