"""What a page shows of one file, and which kind of file it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chipsparse.cli.errors import UserError
from chipsparse.cli.pages.benchmark_record import Benchmark
from chipsparse.cli.pages.comparison_record import ConfigsComparison
from chipsparse.cli.pages.files_record import FilesComparison
from chipsparse.cli.pages.generation_record import Generation
from chipsparse.cli.pages.quality_points import QualityPoint
from chipsparse.cli.pages.records import FileRecord, read_record
from chipsparse.cli.pages.samples import Samples, named_samples
from chipsparse.cli.pages.suite_record import Suite
from chipsparse.cli.pages.tuning_record import Tuning
from chipsparse.report.as_json import SCHEMA
from chipsparse.tuning.results_file import FORMAT

KNOWN = (
    "generate --report, a results file of tune, compare --json, the suite.json of compare --suite "
    "and bench --json are what it reads"
)


@dataclass(frozen=True)
class Part:
    """All that a page shows of one file.

    Attributes:
        kind: of the file; its template has the same name.
        file: its path.
        record: what is in it.
        samples: frames of what it names, or why there are none; None for a kind that has none.
    """

    kind: str
    file: Path
    record: FileRecord
    samples: Samples | str | None

    @property
    def points(self) -> list[QualityPoint]:
        """For the chart that joins several files."""
        return self.record.points(self.file.stem)


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        record: what is read of it.
        names: of values which only this kind has all of.
    """

    record: type[FileRecord]
    names: frozenset[str]


KINDS = {
    "generation": Kind(Generation, frozenset({"schema", "steps", "totals"})),
    "tuning": Kind(Tuning, frozenset({"format", "about", "measured"})),
    "comparison": Kind(ConfigsComparison, frozenset({"mode", "configs", "prompts", "interval"})),
    "suite": Kind(Suite, frozenset({"mode", "rows", "thresholds"})),
    "files": Kind(FilesComparison, frozenset({"mode", "a", "b", "per_frame"})),
    "benchmark": Kind(Benchmark, frozenset({"layers", "tokens", "command", "settings"})),
}


def part_of(file: Path, content: dict[str, Any]) -> Part:
    """What a page shows of a file's content.

    Raises:
        UserError: it is of no kind that is known, of another version, or damaged.
    """
    kind = kind_of(file, content)
    record = read_record(KINDS[kind].record, file, content)
    clips = record.clips
    return Part(kind, file, record, None if clips is None else named_samples(file, clips))


def kind_of(file: Path, content: dict[str, Any]) -> str:
    """The name of one of `KINDS`.

    Raises:
        UserError: the file is none of them, or of a version that is not known.
    """
    for name, kind in KINDS.items():
        if kind.names <= content.keys():
            _check_version(file, content, kind)
            return name
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


def _check_version(file: Path, content: dict[str, Any], kind: Kind) -> None:
    for field, known in (("schema", SCHEMA), ("format", FORMAT)):
        if field in kind.names and content[field] != known:
            raise UserError(
                f"{file} has the {field} {content[field]!r}, and this version of chipsparse reads "
                f"{known}; use the version that wrote it"
            )
