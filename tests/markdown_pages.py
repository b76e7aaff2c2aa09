"""Markdown pages as their parts: links, anchors, blocks and spans of code, tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt  # rich brings it
from markdown_it.token import Token


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        info: what stands behind the fence, such as "python run"; empty for an indented block.
        text: what stands in it.
        line: number of its first line in the page, from 1.
    """

    info: str
    text: str
    line: int

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]


@dataclass(frozen=True)
class Page:
    """A page of Markdown, in GitHub's flavour."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse(self.text)

    def _inline(self) -> Iterator[Token]:
        for token in self.tokens:
            yield from token.children or ()

    @property
    def links(self) -> list[str]:
        """The targets of all links and pictures."""
        targets = (token.attrGet("href") or token.attrGet("src") for token in self._inline())
        return [str(target) for target in targets if target]

    @property
    def spans(self) -> list[str]:
        """All code inside sentences."""
        return [token.content for token in self._inline() if token.type == "code_inline"]

    @property
    def anchors(self) -> set[str]:
        """The fragments by which GitHub knows the headings."""
        anchors, seen = set(), Counter[str]()
        for heading, content in zip(self.tokens, self.tokens[1:], strict=False):
            if heading.type != "heading_open":
                continue
            shown = "".join(token.content for token in content.children or ())
            slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
        return anchors

    @property
    def blocks(self) -> list[Block]:
        """All blocks of code."""
        return [
            Block(token.info.strip(), token.content, first_line(token))
            for token in self.tokens
            if token.type in ("fence", "code_block")
        ]

    @property
    def tables(self) -> list[list[list[str]]]:
        """All tables as rows of cells, each as it is written."""
        lines = self.text.splitlines()
        return [
            [cells(line) for line in lines[token.map[0] : token.map[1]]]
            for token in self.tokens
            if token.type == "table_open" and token.map
        ]


def first_line(token: Token) -> int:
    """The number of a block's first line of code, from 1; the fence is not one."""
    assert token.map is not None
    return token.map[0] + 1 + (token.type == "fence")


def cells(line: str) -> list[str]:
    """The cells of a row; a bar inside one is written with a backslash before it."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def commands(block: Block) -> list[str]:
    """The command lines of a block, prompts and continuations taken away."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("$ ") for line in lines if line.strip()]
