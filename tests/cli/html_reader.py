"""Reads a page as a browser would, as far as tests need it."""

from __future__ import annotations

from collections import Counter, defaultdict
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "input", "hr"}
FETCHING = {"src", "srcset", "href", "xlink:href", "action", "data", "poster"}


class PageReader(HTMLParser):
    """The elements of a page, its texts, and whatever is wrong with its nesting."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.source = page
        self.style = ""
        self._section = ""
        self._open = []
        self.elements = []  # tag and attributes, in order
        self.headings = []  # of h1, h2 and h3
        self.texts = []  # all others but the style sheet
        self.sections = defaultdict(str)  # these texts of each section, by its heading
        self.problems = []  # wrong nesting, and ids and attributes that stand twice
        self.feed(page)
        self.close()
        self.problems += [f"{tag} was not closed" for tag in self._open]
        ids = Counter(own["id"] for _, own in self.elements if "id" in own)
        self.problems += [f"the id {name} stands twice" for name, n in ids.items() if n > 1]

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if len(dict(attrs)) != len(attrs):
            self.problems.append(f"{tag} has an attribute twice: {attrs}")

    def handle_endtag(self, tag):
        if self._open[-1:] == [tag]:
            self._open.pop()
        else:
            self.problems.append(f"{tag} was closed in {self._open}")

    def handle_data(self, data):
        inside = self._open[-1] if self._open else ""
        if inside == "style":
            self.style += data
        elif inside in ("h1", "h2", "h3"):
            self.headings.append(data)
            self._section = data if inside != "h3" else self._section
        elif data.strip():
            self.texts.append(data)
            self.sections[self._section] += f"{data}\n"

    def all(self, tag, **attributes):
        """The attributes of all elements of a tag that have these values."""
        wanted = attributes.items()
        return [own for name, own in self.elements if name == tag and wanted <= own.items()]

    def external(self):
        """Whatever a browser would fetch, run or send."""
        result = [tag for tag, _ in self.elements if tag in ("script", "link", "iframe", "object")]
        result += [word for word in ("url(", "@import", "http") if word in self.style]
        for tag, attributes in self.elements:
            for name, value in attributes.items():
                inside = (value or "").startswith(("data:image/", "#"))
                fetches = name in FETCHING and not inside
                if fetches or name.startswith("on") or "url(" in (value or "").replace("url(#", ""):
                    result.append(f"{tag} {name}={value}")
        return result
