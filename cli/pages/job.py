"""The work of `chipsparse report`: from files of JSON to one page."""

from __future__ import annotations

import dataclasses

from chipsparse.cli.commands.report import ReportOptions
from chipsparse.cli.media.output_names import check_inputs_stay
from chipsparse.cli.media.report_file import check_file, staged_file
from chipsparse.cli.pages.page import check_library, page
from chipsparse.cli.pages.part import part_of
from chipsparse.cli.pages.records import read_json
from chipsparse.cli.pages.samples import Samples, read_sample
from chipsparse.cli.views.names import name_of

SUFFIXES = (".html", ".htm")


def write_report(options: ReportOptions) -> int:
    """Reads the files and writes the page, all of it or nothing; returns its bytes.

    Raises:
        UserError: a file is none of those that commands of chipsparse write, is damaged or cannot
            be read, or the page cannot be made or written.
    """
    sources, media = options.sources, options.media or []
    check_library()
    check_file("--output", options.output, *SUFFIXES)
    check_inputs_stay("--output", options.output, [*sources, *media])
    parts = [part_of(source, read_json(source)) for source in sources]
    if media:
        shown = [read_sample(path, name_of(str(path))) for path in media]
        parts[0] = dataclasses.replace(parts[0], samples=Samples(shown))
    text = page(parts)
    with staged_file("--output", options.output, text):
        pass
    return len(text.encode("utf-8"))
