"""What a page shows of one file, and which kind of file it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chipsparse.cli.errors import UserError
from chipsparse.cli.pages.comparison_record import ConfigsComparison, FilesComparison
from chipsparse.cli.pages.generation_record import Generation
from chipsparse.cli.pages.records import FileRecord, read_record
from chipsparse.cli.pages.samples import Samples, named_samples
from chipsparse.cli.pages.suite_record import Suite
from chipsparse.cli.pages.tuning_record import Tuning
from chipsparse.report.as_json import SCHEMA
from chipsparse.tuning.results_file import FORMAT

KINDS: tuple[type[FileRecord], ...] = (
    Generation,
    Tuning,
    ConfigsComparison,
    Suite,
    FilesComparison,
)
KNOWN = (
    "generate --report, a results file of tune, compare --json and the suite.json of "
    "compare --suite are what it reads"
)


@dataclass(frozen=True)
class Part:
    """All that a page shows of one file.

    Attributes:
        samples: frames of what it names, or why there are none; None for a kind that has none.
    """

    file: Path
    record: FileRecord
    samples: Samples | str | None


def part_of(file: Path, content: dict[str, Any]) -> Part:
    """What a page shows of a file's content.

    Raises:
        UserError: it is of no kind that is known, of another version, or damaged.
    """
    record = read_record(_kind_of(file, content), file, content)
    for name in record.always:
        if name not in content:
            raise UserError(f"{file} is damaged: {name} is missing")
    clips = record.clips
    return Part(file, record, None if clips is None else named_samples(file, clips))


def _kind_of(file: Path, content: dict[str, Any]) -> type[FileRecord]:
    for kind in KINDS:
        if kind.marks <= content.keys():
            _check_version(file, content, kind)
            return kind
    if {"mode", "prompt", "sparse", "dense"} <= content.keys():
        raise UserError(
            f"{file} is what generate --json prints; give the file of its --report instead"
        )
    if {"profile", "results", "tuned", "configs_tried"} <= content.keys():
        raise UserError(
            f"{file} is what tune --json prints; give the results file that it names, "
            f"{content['results']}, instead"
        )
    raise UserError(f"{file} is of no kind that report knows: {KNOWN}")


def _check_version(file: Path, content: dict[str, Any], kind: type[FileRecord]) -> None:
    for field, known in (("schema", SCHEMA), ("format", FORMAT)):
        if field in kind.marks and content[field] != known:
            raise UserError(
                f"{file} has the {field} {content[field]!r}, and this version of chipsparse reads "
                f"{known}; use the version that wrote it"
            )
