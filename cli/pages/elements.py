"""Elements of a page, in HTML or SVG, with every text and attribute escaped as it is written.

The trees are those of the standard library, so that no piece of a page is ever put together from
text: a prompt with ``<script>`` in it is a text like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree

Element = ElementTree.Element
Child = Element | str | None
Attribute = str | int | float | None

# Neither XML nor HTML has a way to write these.
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def element(tag: str, *children: Child, **attributes: Attribute) -> Element:
    """An element.

    Args:
        tag: its name.
        children: elements and texts, in order; None is left out.
        attributes: by name, None left out; ``class_`` is ``class``, and an underscore a hyphen.
            Numbers are rounded to hundredths, more than a screen can show.
    """
    made = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            made.set(name.rstrip("_").replace("_", "-"), _text(value))
    return add(made, *children)


def add(parent: Element, *children: Child) -> Element:
    """Adds elements and texts behind what an element has, and returns it."""
    for child in children:
        if isinstance(child, Element):
            parent.append(child)
        elif child is not None:
            last = parent[-1] if len(parent) else None
            if last is None:
                parent.text = (parent.text or "") + _text(child)
            else:
                last.tail = (last.tail or "") + _text(child)
    return parent


def listed(texts: Iterable[Child], *, class_: str | None = None) -> Element:
    """A list with a point for each text."""
    return element("ul", *(element("li", text) for text in texts), class_=class_)


def rendered(page: Element) -> str:
    """The whole page as text."""
    return "<!DOCTYPE html>\n" + ElementTree.tostring(page, encoding="unicode", method="html")


def _text(value: str | int | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(value))
