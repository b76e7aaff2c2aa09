"""The work of `chipsparse report`: from files of JSON to one page."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chipsparse.cli.output_names import check_inputs_stay
from chipsparse.cli.pages import samples
from chipsparse.cli.pages.benchmark import benchmark_part
from chipsparse.cli.pages.comparison import comparison_part
from chipsparse.cli.pages.files import files_part
from chipsparse.cli.pages.generation import generation_part
from chipsparse.cli.pages.generation_record import read_generation
from chipsparse.cli.pages.json_values import Values, read_values
from chipsparse.cli.pages.names import name_of
from chipsparse.cli.pages.page import page
from chipsparse.cli.pages.part import Missing, Part, Section
from chipsparse.cli.pages.sources import kind_of
from chipsparse.cli.pages.suite import suite_part
from chipsparse.cli.pages.tuning import tuning_part
from chipsparse.cli.report_file import check_file, staged_file

SUFFIXES = (".html", ".htm")
MakePart = Callable[[Values], Part]
MakeSamples = Callable[[Values], Section | Missing]

PARTS: dict[str, tuple[MakePart, MakeSamples | None]] = {
    "generation": (
        generation_part,
        lambda values: samples.generation_samples(read_generation(values)),
    ),
    "tuning": (tuning_part, None),
    "configs": (comparison_part, samples.configs_samples),
    "suite": (suite_part, None),
    "files": (files_part, samples.files_samples),
    "benchmark": (benchmark_part, None),
}


@dataclass(frozen=True)
class ReportOptions:
    """What the user typed.

    Attributes:
        sources: files of JSON, at least one.
        output: the page.
        media: files to show frames of.
    """

    sources: Sequence[Path]
    output: Path
    media: Sequence[Path]


def write_report(options: ReportOptions) -> int:
    """Reads the files and writes the page, all of it or nothing; returns its bytes.

    Raises:
        UserError: a file is none of those that commands of chipsparse write, is damaged or cannot
            be read, or the page cannot be written.
    """
    check_file("--output", options.output, *SUFFIXES)
    check_inputs_stay("--output", options.output, [*options.sources, *options.media])
    parts = [part_of(read_values(source)) for source in options.sources]
    if options.media:
        shown = [samples.read_sample(path, name_of(str(path))) for path in options.media]
        first, *others = parts
        parts = [_with(first, samples.samples_section(shown), in_place=True), *others]
    text = page(parts)
    with staged_file("--output", options.output, text):
        pass
    return len(text.encode("utf-8"))


def part_of(values: Values) -> Part:
    """What the page says of one file, with the frames of the pictures that it names."""
    make, find_samples = PARTS[kind_of(values)]
    part = make(values)
    return part if find_samples is None else _with(part, find_samples(values))


def _with(part: Part, found: Section | Missing, *, in_place: bool = False) -> Part:
    """A part with sample frames, in front of everything but the headline."""
    sections, missing = list(part.sections), list(part.missing)
    if in_place:
        sections = [each for each in sections if each.title != found.title]
        missing = [each for each in missing if each.title != found.title]
    if isinstance(found, Section):
        sections.insert(0, found)
    else:
        missing.append(found)
    return dataclasses.replace(part, sections=sections, missing=missing)
