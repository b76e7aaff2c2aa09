"""Reads a page as a browser would, as far as tests need it."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "input", "hr"}


class PageReader(HTMLParser):
    """The elements of a page, its texts, and whatever is wrong with its nesting.

    Attributes:
        source: the page.
        elements: tag and attributes, in order.
        headings: texts of h1, h2 and h3.
        texts: all other texts but the style sheet, in order.
        sections: texts of each section, by its heading.
        style: the style sheet.
        problems: what was not closed, or closed without being open.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = page
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.texts: list[str] = []
        self.sections: dict[str, str] = {}
        self.style = ""
        self.problems: list[str] = []
        self._open: list[str] = []
        self._section = ""
        self.feed(page)
        self.close()
        self.problems += [f"{tag} was not closed" for tag in self._open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if len(dict(attrs)) != len(attrs):
            self.problems.append(f"{tag} has an attribute twice: {attrs}")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self._open or self._open[-1] != tag:
            self.problems.append(f"{tag} was closed in {self._open}")
        else:
            self._open.pop()

    def handle_data(self, data):
        if not data.strip():
            return
        inside = self._open[-1] if self._open else ""
        if inside == "style":
            self.style += data
        elif inside in ("h1", "h2", "h3"):
            self.headings.append(data)
            self._section = data if inside != "h3" else self._section
        else:
            self.texts.append(data)
            self.sections[self._section] = f"{self.sections.get(self._section, '')}{data}\n"

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a tag that have these words in these attributes."""
        return [
            found
            for name, found in self.elements
            if name == tag
            and all(
                set(v.split()) <= set((found.get(n) or "").split()) for n, v in attributes.items()
            )
        ]

    @property
    def text(self) -> str:
        """All texts."""
        return "\n".join([*self.headings, *self.texts])

    def external(self) -> list[str]:
        """Whatever a browser would fetch, run or send."""
        found = [tag for tag, _ in self.elements if tag in ("script", "link", "iframe", "object")]
        for tag, attributes in self.elements:
            for name, value in attributes.items():
                if name.startswith("on"):
                    found.append(f"{tag} {name}")
                if name in ("src", "srcset", "href", "xlink:href", "action", "data", "poster"):
                    inside = (value or "").startswith(("data:image/", "#"))
                    found += [] if inside else [f"{tag} {name}={value}"]
                if "url(" in (value or "").replace("url(#", ""):
                    found.append(f"{tag} {name}={value}")
        found += [word for word in ("url(", "@import", "http") if word in self.style]
        return found
