"""Charts that matplotlib draws, as SVG that stands in the page itself.

The style sheet repaints what matplotlib paints in one of the named colours, on bright and on dark
screens. A chart is drawn once for wide and once for narrow screens: text in a drawing that shrinks
with the screen could not be read there.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, StepPatch

from chipsparse.cli.views.canvas import TIP, WIDE, Canvas
from chipsparse.cli.views.colours import ACTIONS, BACK, INK, RULE, SERIES, SHADES, SOFT
from chipsparse.cli.views.names import without_folders
from chipsparse.cli.views.sections import Chart

# Sizes in pixels.
NARROW = 340
LEFT = 62
RIGHT = 14
TOP = 30
BOTTOM = 42
POINTS = 72  # an inch of SVG has as many units
NAMES = ("first", "second", "third", "fourth", "ink", "soft", "rule", "back", *ACTIONS)
PAINTS = (*SERIES, INK, SOFT, RULE, BACK, *ACTIONS.values())
COLOURS = {paint: f"var(--{name})" for paint, name in zip(PAINTS, NAMES, strict=True)} | {
    shade: f"color-mix(in oklab, var(--high) {100 * place / 9:.0f}%, var(--low))"
    for place, shade in enumerate(SHADES)
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # texts stay texts
    "svg.hashsalt": "chipsparse",  # the same page for the same results
    "text.parse_math": False,
    "axes.facecolor": "none",
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.ymargin": 0.06,
    "font.size": 12,
    "grid.color": RULE,
    "grid.linewidth": 1,
    "lines.linewidth": 2,
    "lines.dashed_pattern": (3, 2),
    "lines.markeredgecolor": BACK,
    "patch.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": RULE,
    "xtick.labelcolor": SOFT,
    "ytick.color": RULE,
    "ytick.labelcolor": SOFT,
    "ytick.major.size": 0,
}
SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"
ElementTree.register_namespace("", SVG[1:-1])
ElementTree.register_namespace("xlink", XLINK[1:-1])


class Key(NamedTuple):
    """An entry of a legend: "box", "line", "dashed", "dot" or "square" of a colour, and text."""

    shape: str
    colour: str
    label: str


class Drawn(NamedTuple):
    """A chart in a page: its legend, and SVG for wide and for narrow screens."""

    keys: Sequence[Key]
    wide: Markup
    narrow: Markup


def draw_chart(chart: Chart, name: str) -> Drawn:
    """Draw a chart for both widths; the name of each of a page's charts makes its ids its own."""
    wide, keys = _draw(chart, WIDE, f"{name}-wide-")
    narrow, _ = _draw(chart, NARROW, f"{name}-narrow-")
    return Drawn(keys, wide, narrow)


def _draw(chart: Chart, width: int, prefix: str) -> tuple[Markup, list[Key]]:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A letter that the font lacks has no known width; the browser has other fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        size = width / POINTS, chart.height / POINTS
        figure = Figure(size, dpi=POINTS, facecolor="none")
        across = width - LEFT - RIGHT
        up = chart.height - TOP - BOTTOM
        low = BOTTOM / chart.height
        height = up / chart.height
        axes = figure.add_axes((LEFT / width, low, across / width, height))
        chart.draw(Canvas(axes))
        # The label stands above the axis, where it takes no width.
        figure.text(4 / width, 1 - 14 / chart.height, axes.get_ylabel())
        axes.set_ylabel("")
        axes.xaxis.set_label_coords(0.5, -34 / up)
        text = io.StringIO()
        no_metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(text, format="svg", metadata=no_metadata)
    handles = zip(*axes.get_legend_handles_labels(), strict=True)
    keys = dict.fromkeys(_key(handle, str(label)) for handle, label in handles)
    return Markup(_inline(text.getvalue(), prefix)), [*keys]


def _inline(text: str, prefix: str) -> str:
    """Return what matplotlib wrote as an element of a page, its ids with a prefix."""
    root = ElementTree.fromstring(text)
    del root.attrib["width"], root.attrib["height"]
    root.remove(root[0])  # a style sheet, which would be the whole page's
    for element in root.iter():
        name = element.attrib.pop("id", "")
        if name.startswith(TIP):
            title = ElementTree.Element(f"{SVG}title")
            title.text = without_folders(name.removeprefix(TIP))
            element.insert(0, title)
        elif element.tag in (f"{SVG}path", f"{SVG}clipPath") and name:
            element.set("id", prefix + name)
        if element.tag == f"{SVG}text":
            element.text = without_folders(element.text or "")
        for key in {"d", "x", "y"}.intersection(element.keys()):
            # A screen shows no more digits.
            shorter = re.sub(r"(\.\d\d)\d+", r"\1", " ".join(element.attrib[key].split()))
            element.set(key, shorter)
        if "style" in element.attrib:
            element.set("style", _style(element.attrib["style"]))
        for key in (f"{XLINK}href", "clip-path"):
            if key in element.attrib:
                element.set(key, element.attrib[key].replace("#", f"#{prefix}", 1))
    return ElementTree.tostring(root, encoding="unicode")


def _style(style: str) -> str:
    """Return a style without fonts, which are the page's, and with the page's colours."""
    style = re.sub(r"font(-size|-family)?:[^;]*(; *|$)", "", style)
    return re.sub(r"#[0-9a-f]{6}", lambda match: COLOURS.get(match[0], match[0]), style)


def _key(handle: Artist, label: str) -> Key:
    assert isinstance(handle, (Line2D, Patch))
    shape = "dashed" if handle.get_linestyle() == "--" else "line"
    if isinstance(handle, Line2D):
        shape = {"o": "dot", "s": "square"}.get(str(handle.get_marker()), shape)
        paint = handle.get_color()
    elif isinstance(handle, StepPatch):
        paint = handle.get_edgecolor()
    else:
        shape = "box"
        paint = handle.get_facecolor()
    return Key(shape, COLOURS[matplotlib.colors.to_hex(paint)], label)
