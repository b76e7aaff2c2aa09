"""Charts that matplotlib draws, as SVG which stands in the page itself.

What matplotlib paints in one of `COLOURS` the style sheet paints, on a bright and on a dark screen.
A chart is drawn once for wide screens and once for narrow ones, since text in a drawing that
shrinks with the screen could not be read there.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle, StepPatch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from chipsparse.cli.views.names import without_folders

WIDE, NARROW = 840, 340  # pixels
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 42
POINTS = 72  # an inch of SVG has as many units
SERIES = FIRST, SECOND, THIRD, FOURTH = "#0072b2", "#c44e00", "#00805a", "#a5578b"
INK, SOFT, RULE, BACK = "#1b1f24", "#57606a", "#d9dee3", "#ffffff"
ACTIONS = {"dense": "#9aa2ab", "refresh": "#e69f00", "sparse": "#0072b3", "skip": "#fffffe"}
SHADES = tuple(f"#0842{shade:02x}" for shade in range(10))  # from the lowest share to the highest
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
LETTER = 7.5  # width of a letter in pixels, about
AROUND = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
TIP = "tip: "
SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
ElementTree.register_namespace("", SVG[1:-1])
ElementTree.register_namespace("xlink", XLINK[1:-1])


Mark = tuple[float, float, str]  # a point and the text that belongs to it


@dataclass(frozen=True)
class Chart:
    """A diagram.

    Attributes:
        title: says to those who cannot see it what it shows.
        draw: draws it on axes: marks, labels of both axes, and of the marks for the legend.
        height: in pixels, with the axes.
    """

    title: str
    draw: Callable[[Axes], object]
    caption: str
    height: int = 280


@dataclass(frozen=True)
class Key:
    """What a colour means: "box", "line", "dashed", "dot" or "square" of it, and the text."""

    shape: str
    colour: str
    label: str


@dataclass(frozen=True)
class Drawn:
    """A chart as it stands in a page: its legend, and SVG for wide and for narrow screens."""

    keys: Sequence[Key]
    wide: Markup
    narrow: Markup


class Renderer:
    """Draws the charts of one page, in which no two elements share an id."""

    def __init__(self) -> None:
        self._drawn = 0

    def __call__(self, chart: Chart) -> Drawn:
        """Draws one."""
        wide, keys = self._draw(chart, WIDE)
        narrow, _ = self._draw(chart, NARROW)
        return Drawn(keys, wide, narrow)

    def _draw(self, chart: Chart, width: int) -> tuple[Markup, list[Key]]:
        self._drawn += 1
        with matplotlib.rc_context(STYLE), warnings.catch_warnings():
            # A letter that the font lacks has no known width; the browser has other fonts.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            size = width / POINTS, chart.height / POINTS
            figure = Figure(size, dpi=POINTS, facecolor="none")
            across, up = width - LEFT - RIGHT, chart.height - TOP - BOTTOM
            axes = figure.add_axes(
                (LEFT / width, BOTTOM / chart.height, across / width, up / chart.height)
            )
            chart.draw(axes)
            # Above the axis, where it takes no width.
            figure.text(4 / width, 1 - 14 / chart.height, axes.get_ylabel())
            axes.set_ylabel("")
            axes.xaxis.set_label_coords(0.5, -34 / up)
            text = io.StringIO()
            about = {"Date": None, "Creator": None, "Format": None, "Type": None}
            figure.savefig(text, format="svg", metadata=about)
        drawn = _inline(text.getvalue(), prefix=f"chart{self._drawn}-")
        return Markup(drawn), [*dict.fromkeys(_keys(axes))]


def tipped(artist: Artist, tip: str) -> None:
    """An artist says this when the pointer rests on it."""
    artist.set_gid(TIP + tip)


def _inline(text: str, prefix: str) -> str:
    """What matplotlib wrote, as an element of a page.

    Args:
        prefix: makes its ids different from those of other charts.
    """
    root = ElementTree.fromstring(text)
    del root.attrib["width"], root.attrib["height"]
    root.remove(root[0])  # a style sheet, which would be the whole page's
    for each in root.iter():
        name = each.attrib.pop("id", "")
        if name.startswith(TIP):
            title = ElementTree.Element(f"{SVG}title")
            title.text = without_folders(name.removeprefix(TIP))
            each.insert(0, title)
        elif each.tag in (f"{SVG}path", f"{SVG}clipPath") and name:
            each.set("id", prefix + name)
        if each.tag == f"{SVG}text":
            each.text = without_folders(each.text or "")
        for name in {"d", "x", "y"}.intersection(each.keys()):
            # A screen shows no more digits.
            each.set(name, re.sub(r"(\.\d\d)\d+", r"\1", " ".join(each.attrib[name].split())))
        if "style" in each.attrib:
            each.set("style", _style(each.attrib["style"]))
        for name in (f"{XLINK}href", "clip-path"):
            if name in each.attrib:
                each.set(name, each.attrib[name].replace("#", f"#{prefix}", 1))
        if each.get("transform", "").startswith("rotate(-0 "):
            del each.attrib["transform"]
        if not (each.text or "").strip():
            each.text = None
        each.tail = None
    return ElementTree.tostring(root, encoding="unicode")


def _style(style: str) -> str:
    """Without fonts, which are the page's, and with its colours."""
    style = re.sub(r"font(-size|-family)?:[^;]*(; *|$)", "", style)
    return re.sub(r"#[0-9a-f]{6}", lambda found: COLOURS.get(found[0], found[0]), style)


def _keys(axes: Axes) -> Iterator[Key]:
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        assert isinstance(handle, (Line2D, Patch))
        shape = "dashed" if handle.get_linestyle() == "--" else "line"
        if isinstance(handle, Line2D):
            shape = {"o": "dot", "s": "square"}.get(str(handle.get_marker()), shape)
            paint = handle.get_color()
        elif isinstance(handle, StepPatch):
            paint = handle.get_edgecolor()
        else:
            shape, paint = "box", handle.get_facecolor()
        yield Key(shape, COLOURS[matplotlib.colors.to_hex(paint)], str(label))


# What several charts have.


def steps_axis(axes: Axes, count: int, upwards: str) -> None:
    """The denoising steps of a generation across, and what is shown of them upwards."""
    whole_axis(axes, "denoising step, from 0", count)
    axes.set_ylabel(upwards)


def whole_axis(axes: Axes, label: str, count: int) -> None:
    """Whole numbers across, each with a place as wide as the others."""
    axes.set_xlim(-0.5, max(1, count) - 0.5)
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.grid(axis="y")


def dots(
    axes: Axes,
    marks: Iterable[Mark],
    colour: str,
    *,
    label: str | None = None,
    square: bool = False,
    radius: float = 4.0,
    alpha: float | None = None,
) -> None:
    """Points with their tips; squares, so that more than the colour tells them from others."""
    form = "s" if square else "o"
    for x, y, tip in marks:
        (dot,) = axes.plot(
            x, y, form, color=colour, markersize=2 * radius, alpha=alpha, label=label
        )
        tipped(dot, tip)
        label = None


def box_key(axes: Axes, colour: str, label: str) -> None:
    """Has the legend say what boxes of a colour are."""
    axes.add_patch(Rectangle((0, 0), 0, 0, facecolor=colour, label=label))


def level(axes: Axes, value: float, label: str) -> None:
    """A value that is marked across the whole chart."""
    axes.axhline(value, color=INK, linewidth=1.2, linestyle=":")
    axes.annotate(
        label, (0, value), (6, 4), xycoords=("axes fraction", "data"), textcoords="offset points"
    )


def labels(axes: Axes, marks: Sequence[Mark]) -> None:
    """Short texts beside points, each where it covers no point and no other text, if it can."""
    axes.autoscale_view()
    places = [(*axes.transData.transform((x, y)), text) for x, y, text in marks]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y, _ in places]
    for x, y, text in places:
        wide = LETTER * len(text)
        middles = [(x + dx * (9 + wide / 2), y + dy * 13) for dx, dy in AROUND]
        boxes = [Bbox.from_bounds(a - wide / 2, b - 6, wide, 12) for a, b in middles]
        covered = [sum(_overlap(box, other) for other in taken) for box in boxes]
        best = covered.index(min(covered))
        taken.append(boxes[best])
        left, up = axes.transData.inverted().transform(middles[best])
        axes.text(left, up, text, ha="center", va="center")


def _overlap(a: Bbox, b: Bbox) -> float:
    """How much of two boxes lies in both."""
    shared = Bbox.intersection(a, b)
    return 0.0 if shared is None else shared.width * shared.height
