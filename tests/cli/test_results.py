"""One record, printed for people or as JSON."""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from chipsparse.cli.results import NO_JSON, fields_json, json_values, results_alone, tell
from chipsparse.plan import Action


@dataclass(frozen=True)
class Part:
    milliseconds: float
    file: Path


@dataclass(frozen=True)
class Record:
    parts: list[Part]
    counts: dict[Action, int]
    device: torch.device
    dtype: torch.dtype
    pixels: bytes = field(metadata=NO_JSON, default=b"")
    also_in_json: ClassVar = ("total",)

    @property
    def total(self) -> float:
        return sum(part.milliseconds for part in self.parts)


RECORD = Record(
    [Part(1.5, Path("a/b")), Part(math.inf, Path("c"))],
    {Action.SPARSE: 3},
    torch.device("cpu"),
    torch.bfloat16,
)


def test_json_of_a_record():
    assert json_values(RECORD) == {
        "parts": [{"milliseconds": 1.5, "file": "a/b"}, {"milliseconds": None, "file": "c"}],
        "counts": {"sparse": 3},
        "device": "cpu",
        "dtype": "bfloat16",
        "total": None,
    }


def test_a_record_that_says_what_its_json_is():
    @dataclass(frozen=True)
    class Named(Part):
        def to_json(self):
            return {**fields_json(self), "name": self.file.name}

    expected = {"milliseconds": 2.0, "file": "a/b", "name": "b"}
    assert json_values([Named(2.0, Path("a/b"))]) == [expected]


@pytest.mark.parametrize("value", [None, True, 3, "x", 0.25])
def test_what_json_has_stays(value):
    found = json_values(value)
    assert (type(found), found) == (type(value), value)


def test_texts_are_what_utf_8_can_take():
    path = Path(os.fsdecode(b"d\xff/c.mp4"))
    assert json_values({path: [path, str(path), "ü"]}) == {
        "d\ufffd/c.mp4": ["d\ufffd/c.mp4", "d\ufffd/c.mp4", "ü"]
    }


def test_printed_for_people_or_as_json(capsys):
    def page(found, console):
        console.print(len(found))

    tell([RECORD], page, as_json=False)
    assert capsys.readouterr().out == "1\n"
    tell([RECORD], page, as_json=True)
    assert json.loads(capsys.readouterr().out) == json_values([RECORD])


def test_stdout_is_for_results(capsys):
    with results_alone():
        print("loading")
    assert capsys.readouterr() == ("", "loading\n")
