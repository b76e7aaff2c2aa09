"""The work of `chipsparse report`: from files of results to one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from chipsparse.cli.errors import user_errors
from chipsparse.cli.media.write import check_file, check_inputs_stay, write_text
from chipsparse.cli.views.files import read_result
from chipsparse.cli.views.frames import read_sample
from chipsparse.cli.views.names import name_of
from chipsparse.cli.views.page import check_charts, page


def write_report(sources: Sequence[Path], media: Sequence[Path], output: Path) -> int:
    """Read the files and write the page, all of it or nothing; return its bytes."""
    check_charts()
    check_file("--output", output, ".html", ".htm")
    check_inputs_stay("--output", output, [*sources, *media])
    results = [(source, read_result(source)) for source in sources]
    samples = [read_sample(path, name_of(str(path))) for path in media]
    misfits = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
    with user_errors(*misfits, what="the values in the files do not fit each other"):
        text = page(results, samples=samples)
    write_text("--output", output, text)
    return len(text.encode("utf-8"))
