"""Markdown pages as their parts: links, anchors, blocks and spans of code, tables."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt  # rich brings it


@dataclass(frozen=True)
class Block:
    """A block of code."""

    info: str  # what stands behind the fence, such as "python run"; empty for an indented block
    text: str
    line: int  # number of its first line in the page, from 1

    @property
    def language(self):
        return self.info.partition(" ")[0]

    @property
    def commands(self):
        """The command lines, prompts and continuations taken away."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip().removeprefix("$ ") for line in lines if line.strip()]


@dataclass(frozen=True)
class Page:
    """A page of Markdown, in GitHub's flavour."""

    path: Path

    @cached_property
    def text(self):
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tokens(self):
        return MarkdownIt("commonmark").enable("table").parse(self.text)

    @cached_property
    def inline(self):
        return [inner for token in self.tokens for inner in token.children or ()]

    @property
    def links(self):
        targets = (token.attrGet("href") or token.attrGet("src") for token in self.inline)
        return [target for target in targets if target]

    @property
    def spans(self):
        """All code inside sentences."""
        return [token.content for token in self.inline if token.type == "code_inline"]

    @property
    def anchors(self):
        """The fragments by which GitHub knows the headings."""
        anchors = set()
        seen = Counter()
        for heading, content in zip(self.tokens, self.tokens[1:], strict=False):
            if heading.type != "heading_open":
                continue
            shown = "".join(token.content for token in content.children or ())
            slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
        return anchors

    @property
    def blocks(self):
        """All blocks of code; a fence stands before the first line of its block."""
        first_line = {"fence": 2, "code_block": 1}
        return [
            Block(token.info.strip(), token.content, token.map[0] + first_line[token.type])
            for token in self.tokens
            if token.type in first_line
        ]

    @property
    def tables(self):
        lines = self.text.splitlines()
        return [
            [cells(line) for line in lines[slice(*token.map)]]
            for token in self.tokens
            if token.type == "table_open"
        ]


def cells(line):
    """The cells of a row; a bar inside one is written with a backslash before it."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
