"""The work of `chipsparse report`: from files of results, read by their own classes, to a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from chipsparse.cli.compare.record import Comparison, FilesComparison
from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.generate.record import GenerationResult, SeriesResult
from chipsparse.cli.media.write import write_text
from chipsparse.cli.prompts import read_text
from chipsparse.cli.tune.record import TuningResult
from chipsparse.cli.views.frames import read_sample
from chipsparse.cli.views.names import name_of
from chipsparse.cli.views.page import page
from chipsparse.cli.views.sections import Result, clean

RESULTS = (GenerationResult, SeriesResult, Comparison, FilesComparison, TuningResult)
KINDS: dict[str, type[Result]] = {own.model_fields["kind"].default: own for own in RESULTS}


def write_report(sources: Sequence[Path], media: Sequence[Path], output: Path) -> int:
    """Read the files and write the page, all of it or nothing; return its bytes."""
    results = [(source, read_result(source)) for source in sources]
    samples = [read_sample(path, name_of(str(path))) for path in media]
    misfits = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
    with user_errors(*misfits, what="the values in the files do not fit each other"):
        text = page(results, samples=samples)
    write_text("--output", output, text)
    return len(text.encode("utf-8"))


def read_result(path: Path) -> Result:
    """Return the result in a file; raise `UserError` for a damaged one, or none of chipsparse."""
    with user_errors(ValueError, what=f"{path} is no JSON"):
        content: Any = json.loads(read_text(path, str(path)))
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object, as every file of chipsparse is")
    kind = str(content.get("kind"))
    if kind == "report":  # what `GenerationReport.to_dict` gives in Python
        kind = "generation"
        content = {"report": content}
    if kind not in KINDS:
        raise UserError(
            f"{path} is of no kind that report knows; it reads the file of generate --report, the "
            "results file of tune, what compare --json prints and the suite.json of "
            "compare --suite",
        )
    try:
        return KINDS[kind].model_validate(_clean(content), strict=False)
    except ValidationError as error:
        raise UserError(f"{path} is damaged: {_first_mistake(error)}") from error


def _clean(value: object) -> object:
    """Return the same with texts that a page can hold."""
    if isinstance(value, dict):
        return {clean(name): _clean(item) for name, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else clean(value)


def _first_mistake(error: ValidationError) -> str:
    """Return such as ``steps[0].kept is "all"; it should be a valid number``."""
    first = error.errors(include_url=False, include_context=False)[0]
    places = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    place = "".join(places).removeprefix(".") or "the file"
    if first["type"] == "missing":
        return f"{place} is missing"
    value = json.dumps(first["input"], ensure_ascii=False, default=str)
    value = value if len(value) <= 40 else f"{value[:37]}..."
    wanted = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    return f"{place} is {value}; {wanted}"
