"""Charts in SVG: marks between two axes.

What has a colour has a class, and the style sheet says which colour that is, on a bright and on a
dark screen. A chart is drawn once for wide screens and once for narrow ones, since text in a
picture that shrinks with the screen could not be read there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from chipsparse.cli.pages.axes import Axis
from chipsparse.cli.pages.elements import Child, Element, add, element

WIDE, NARROW = 840, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 42
WIDE_TICKS, NARROW_TICKS = 12, 6

Place = Callable[[float], float]
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points joined from left to right.

    Attributes:
        points: in the units of the axes; None ends a line, and the next point begins another.
        class_: its colour.
        dashed: whether it is.
    """

    points: Sequence[Point | None]
    class_: str
    dashed: bool = False

    def draw(self, x: Place, y: Place) -> Iterator[Element]:
        """Its elements."""
        words, pen = [], "M"
        for point in self.points:
            if point is None:
                pen = "M"
                continue
            words.append(f"{pen}{x(point[0]):.1f} {y(point[1]):.1f}")
            pen = "L"
        dashed = " dashed" if self.dashed else ""
        yield element("path", d="".join(words), class_=f"line {self.class_}{dashed}")


@dataclass(frozen=True)
class Dots:
    """Points, each with what it says when the pointer rests on it.

    Attributes:
        points: in the units of the axes.
        tips: one for each.
        class_: their colour.
        radius: in pixels.
        square: whether they are, so that more than the colour tells them from others.
    """

    points: Sequence[Point]
    tips: Sequence[str]
    class_: str
    radius: float = 4.0
    square: bool = False

    def draw(self, x: Place, y: Place) -> Iterator[Element]:
        """Its elements."""
        for (across, up), tip in zip(self.points, self.tips, strict=True):
            title, r = element("title", tip), self.radius
            here, there = x(across), y(up)
            class_ = f"dot {self.class_}"
            if self.square:
                corner = {"x": here - r, "y": there - r, "width": 2 * r, "height": 2 * r}
                yield element("rect", title, class_=class_, **corner)
            else:
                yield element("circle", title, cx=here, cy=there, r=r, class_=class_)


@dataclass(frozen=True)
class Box:
    """A bar, or a cell of a heat-map: a rectangle in the units of the axes.

    Attributes:
        across: where it begins and ends.
        up: likewise.
        class_: its colour.
        tip: what it says when the pointer rests on it.
    """

    across: Point
    up: Point
    class_: str
    tip: str

    def draw(self, x: Place, y: Place) -> Iterator[Element]:
        """Its elements."""
        left, right = sorted(map(x, self.across))
        top, bottom = sorted(map(y, self.up))
        yield element(
            "rect",
            element("title", self.tip),
            x=left,
            y=top,
            width=right - left,
            height=bottom - top,
            class_=f"box {self.class_}",
        )


@dataclass(frozen=True)
class Band:
    """The area between two lines.

    Attributes:
        points: place, lower and upper value.
        class_: its colour.
    """

    points: Sequence[tuple[float, float, float]]
    class_: str

    def draw(self, x: Place, y: Place) -> Iterator[Element]:
        """Its elements."""
        there = [f"{x(place):.1f} {y(high):.1f}" for place, _, high in self.points]
        back = [f"{x(place):.1f} {y(low):.1f}" for place, low, _ in reversed(self.points)]
        yield element("path", d=f"M{'L'.join([*there, *back])}Z", class_=f"band {self.class_}")


@dataclass(frozen=True)
class Whisker:
    """From where to where something lies: a line between two points.

    Attributes:
        start: in the units of the axes.
        end: likewise.
        class_: its colour.
    """

    start: Point
    end: Point
    class_: str

    def draw(self, x: Place, y: Place) -> Iterator[Element]:
        """Its elements."""
        ends = {"x1": x(self.start[0]), "y1": y(self.start[1])}
        ends |= {"x2": x(self.end[0]), "y2": y(self.end[1])}
        yield element("line", class_=f"whisker {self.class_}", **ends)


@dataclass(frozen=True)
class Labels:
    """Short texts beside points, each where it covers no point and no other text, if it can.

    Attributes:
        points: in the units of the axes.
        texts: one for each.
    """

    points: Sequence[Point]
    texts: Sequence[str]

    def draw(self, x: Place, y: Place) -> Iterator[Element]:
        """Its elements."""
        places = [(x(across), y(up)) for across, up in self.points]
        taken = [(left - 5, top - 5, left + 5, top + 5) for left, top in places]
        for (across, up), text in zip(places, self.texts, strict=True):
            wide = LETTER * len(text)
            corners = [(across + dx * (9 + wide / 2), up + dy * 13) for dx, dy in AROUND]
            boxes = [(a - wide / 2, u - 6, a + wide / 2, u + 6) for a, u in corners]
            overlaps = [sum(_overlap(box, other) for other in taken) for box in boxes]
            best = overlaps.index(min(overlaps))
            taken.append(boxes[best])
            middle, base = corners[best]
            yield element("text", text, x=middle, y=base + 4, class_="label middle")


LETTER = 7.5  # width of a letter in pixels, about
AROUND = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))
Rectangle = tuple[float, float, float, float]


def _overlap(a: Rectangle, b: Rectangle) -> float:
    """How much of two rectangles lies in both."""
    across, up = (min(a[i + 2], b[i + 2]) - max(a[i], b[i]) for i in (0, 1))
    return max(0.0, across) * max(0.0, up)


Mark = Line | Dots | Box | Band | Whisker | Labels


@dataclass(frozen=True)
class Level:
    """A value of the upright axis that is marked across the whole chart.

    Attributes:
        value: in its units.
        label: stands at its left end.
    """

    value: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Marks between two axes.

    Attributes:
        title: says to those who cannot see it what it shows.
        x: the axis across.
        y: the upright axis; its label stands above it.
        marks: later ones lie above earlier ones.
        levels: values that are marked.
        height: in pixels, with the axes.
    """

    title: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    levels: Sequence[Level] = ()
    height: int = 280

    def draw(self, width: int) -> Element:
        """The chart, so many pixels wide."""
        left, right, top, bottom = LEFT, width - RIGHT, TOP, self.height - BOTTOM
        x = _place(self.x, left, right)
        y = _place(self.y, top, bottom) if self.y.down else _place(self.y, bottom, top)
        wide = width >= WIDE
        picture = element(
            "svg",
            viewBox=f"0 0 {width} {self.height}",
            class_="wide" if wide else "narrow",
            role="img",
            aria_label=self.title,
        )
        most = WIDE_TICKS if wide else NARROW_TICKS
        add(picture, *self._upright(y, left, right, (bottom - top) // 26))
        add(picture, *self._across(x, top, bottom, most))
        for mark in self.marks:
            add(picture, *mark.draw(x, y))
        for level in self.levels:
            at = y(level.value)
            add(
                picture,
                element("line", x1=left, x2=right, y1=at, y2=at, class_="level"),
                element("text", level.label, x=left + 6, y=at - 5, class_="level-label"),
            )
        middle = (left + right) / 2
        return add(
            picture,
            element("text", self.y.label, x=4, y=14, class_="axis-label"),
            element("text", self.x.label, x=middle, y=self.height - 6, class_="axis-label middle"),
        )

    def _upright(self, y: Place, left: float, right: float, most: int) -> Iterator[Element]:
        for tick in self.y.ticks(max(2, most)):
            at = y(tick)
            if self.y.grid:
                yield element("line", x1=left, x2=right, y1=at, y2=at, class_="grid")
            yield element("text", self.y.text(tick), x=left - 7, y=at + 4, class_="tick end")

    def _across(self, x: Place, top: float, bottom: float, most: int) -> Iterator[Element]:
        for tick in self.x.ticks(most):
            at = x(tick)
            if self.x.grid:
                yield element("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid")
            yield element("text", self.x.text(tick), x=at, y=bottom + 17, class_="tick middle")


def _place(axis: Axis, start: float, end: float) -> Place:
    share = (end - start) / (axis.high - axis.low)
    return lambda value: start + (value - axis.low) * share


@dataclass(frozen=True)
class Key:
    """What a colour means.

    Attributes:
        class_: the colour.
        label: what it stands for.
        shape: "box", "line", "dashed", "dot", or "square".
    """

    class_: str
    label: str
    shape: str = "box"


def figure(chart: Chart, *, caption: str, keys: Sequence[Key] = ()) -> Element:
    """A chart with its heading and what its colours mean, for wide screens and for narrow ones."""
    legend: Child = None
    if keys:
        legend = element(
            "ul", *(element("li", _swatch(key), key.label) for key in keys), class_="legend"
        )
    return element(
        "figure",
        element("figcaption", caption),
        legend,
        chart.draw(WIDE),
        chart.draw(NARROW),
    )


def _swatch(key: Key) -> Element:
    middle, mark = (8.0, 6.0), None
    if key.shape == "box":
        mark = element("rect", x=1, y=1, width=14, height=10, class_=f"box {key.class_}")
    elif key.shape in ("dot", "square"):
        (mark,) = Dots([middle], [key.label], key.class_, square=key.shape == "square").draw(
            lambda value: value, lambda value: value
        )
    else:
        dashed = " dashed" if key.shape == "dashed" else ""
        mark = element("path", d="M0 6L16 6", class_=f"line {key.class_}{dashed}")
    return element("svg", mark, viewBox="0 0 16 12", class_="swatch", aria_hidden="true")


def stairs(values: Sequence[float | None]) -> list[Point | None]:
    """One value for each step as a line that is level during the step."""
    points: list[Point | None] = []
    for step, value in enumerate(values):
        if value is None:
            points.append(None)
        else:
            points += [(step - 0.5, value), (step + 0.5, value)]
    return points


def gaps(points: Sequence[Point]) -> list[Point | None]:
    """Points of whole numbers, with a gap where a number is missing."""
    joined: list[Point | None] = list(points[:1])
    for before, point in pairwise(points):
        joined += [point] if point[0] - before[0] <= 1 else [None, point]
    return joined
