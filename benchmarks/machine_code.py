"""Loops in the machine code of a compiled kernel, as cuobjdump prints it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Products on Hopper, and on other GPUs; of FP8 those with a Q, of int8 those with an I.
PRODUCTS = ("HGMMA", "HMMA", "QGMMA", "QMMA", "UTCQMMA", "IGMMA", "IMMA", "UTCIMMA")
HOT = {*PRODUCTS, "LDGSTS", "UTMALDG"}
HOT_ELSEWHERE = {"LDG"}
LEAVING = {"BRA", "BRX", "EXIT", "RET"}  # after these another basic block starts


@dataclass(frozen=True)
class Instruction:
    """One line of machine code: where it is, what it does, and where it may jump to."""

    address: int
    opcode: str
    target: int | None = None
    conditional: bool = True


def instructions(code: str) -> list[Instruction]:
    """Those of one function, as cuobjdump prints them."""
    found = []
    line = r"^\s*/\*([0-9a-f]{4,})\*/\s+(@\S+\s+)?([A-Z]\w*)([^;]*);"
    for address, predicate, opcode, rest in re.findall(line, code, re.MULTILINE):
        target = re.search(r"0x([0-9a-f]+)\s*$", rest) if opcode == "BRA" else None
        always = not predicate and re.fullmatch(r"(\.\w+)*\s*0x[0-9a-f]+\s*", rest) is not None
        found.append(
            Instruction(
                int(address, 16),
                opcode,
                int(target[1], 16) if target else None,
                not always if opcode == "BRA" else bool(predicate),
            )
        )
    return found


def hot_loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The innermost loops of those that do the work of a function."""
    hot = HOT if any(each.opcode in HOT for each in code) else HOT_ELSEWHERE
    blocks, loops = natural_loops(code)
    working = [
        loop for loop in loops if any(each.opcode in hot for b in loop for each in blocks[b])
    ]
    return [
        [each for block in sorted(loop) for each in blocks[block]]
        for loop in working
        if not any(other < loop for other in working)
    ]


def natural_loops(
    code: Sequence[Instruction],
) -> tuple[list[list[Instruction]], list[frozenset[int]]]:
    """Basic blocks, and the loops as sets of their numbers.

    A branch back to a block that every way here came through closes a loop. Others jump back too:
    rarely executed parts, such as waiting for a barrier again, stand at the end of the code.
    """
    starts = {code[0].address} | {each.target for each in code if each.target is not None}
    blocks: list[list[Instruction]] = []
    for each in code:
        if each.address in starts or not blocks or blocks[-1][-1].opcode in LEAVING:
            blocks.append([])
        blocks[-1].append(each)
    number = {block[0].address: index for index, block in enumerate(blocks)}
    after: list[set[int]] = []
    for index, block in enumerate(blocks):
        last = block[-1]
        ways = {number[last.target]} if last.target in number else set()
        if last.conditional or last.opcode not in LEAVING:
            ways |= {index + 1} & set(range(len(blocks)))
        after.append(ways)
    # What nothing else leads to is jumped to by an address that was computed: a part of the warps.
    entries, reached = [0], _reached(after, [0])
    while len(reached) < len(blocks):
        entries.append(min(set(range(len(blocks))) - reached))
        reached = _reached(after, entries)
    before = [{way for way, ways in enumerate(after) if i in ways} for i in range(len(blocks))]

    # The blocks on every way to a block.
    on_every_way = [frozenset(range(len(blocks)))] * len(blocks)
    changed = True
    while changed:
        changed = False
        for index, ways in enumerate(before):
            common = [] if index in entries else [on_every_way[way] for way in ways]
            new = frozenset({index}).union(frozenset.intersection(*common) if common else ())
            changed |= new != on_every_way[index]
            on_every_way[index] = new

    loops: dict[int, set[int]] = {}
    for head, ways in enumerate(before):
        for tail in ways:
            if head in on_every_way[tail]:
                # All from which the branch back can be reached without passing the head.
                within = [set() if index == head else each for index, each in enumerate(before)]
                loops.setdefault(head, {head}).update(_reached(within, [tail]))
    return blocks, [frozenset(body) for body in loops.values()]


def _reached(after: Sequence[set[int]], entries: Iterable[int]) -> set[int]:
    """The blocks that some way from the entries leads to."""
    reached: set[int] = set()
    waiting = list(entries)
    while waiting:
        block = waiting.pop()
        if block not in reached:
            reached.add(block)
            waiting.extend(after[block])
    return reached
