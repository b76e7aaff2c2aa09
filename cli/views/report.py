"""The work of `chipsparse report`: from files of results to one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chipsparse.cli.media.output_names import check_inputs_stay
from chipsparse.cli.media.report_file import check_file, staged_file
from chipsparse.cli.views.files import read_result
from chipsparse.cli.views.frames import read_sample
from chipsparse.cli.views.names import name_of
from chipsparse.cli.views.page import check_charts, page


def write_report(sources: Sequence[Path], media: Sequence[Path], output: Path) -> int:
    """Read the files and write the page, all of it or nothing; return its bytes.

    Raises:
        UserError: a file is none that commands of chipsparse write, is damaged or cannot be read,
            or the page cannot be made or written.
    """
    check_charts()
    check_file("--output", output, ".html", ".htm")
    check_inputs_stay("--output", output, [*sources, *media])
    results = [(source, read_result(source)) for source in sources]
    samples = [read_sample(path, name_of(str(path))) for path in media]
    text = page(results, samples=samples)
    with staged_file("--output", output, text):
        pass
    return len(text.encode("utf-8"))
