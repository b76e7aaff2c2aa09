"""What `chipsparse compare --suite` tells, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from chipsparse.cli.suite.job import PAGE, TO_SEND, Suite
from chipsparse.cli.suite.rows import FLOOR
from chipsparse.cli.tables import Facts, facts_table, number_table, print_table
from chipsparse.cli.wording import counted, refused_rows, seconds_text

SAME = "the same"
TITLES = {"psnr_db": "PSNR", "ssim": "SSIM", "lpips": "LPIPS"}
FORMS = {"psnr_db": ".2f", "ssim": ".4f", "lpips": ".4f"}


def print_suite(suite: Suite, console: Console) -> None:
    """The table of all rows, and where the rest is."""
    content = suite.content
    rows = content["rows"]
    shown = [
        name for name in TITLES if any(row["summary"] and row["summary"][name] for row in rows)
    ]
    columns = [title for name in shown for title in (TITLES[name], "worst")]
    table = number_table("against dense", "speed-up", *columns, "pass", gap=1)
    notes: Facts = []
    for row in rows:
        if row["summary"] is not None:
            table.add_row(row["name"], *_cells(row, shown))
        if row["refused"] is not None:
            notes.append((row["name"], f"did not run: {row['refused']}"))
        notes += [(row["name"], text) for text in row["remarks"]]
    print_table(console, table)
    asked = content["thresholds"]
    facts: Facts = [
        ("dense", f"{seconds_text(content['dense_seconds']['median'])} denoising, median"),
        ("compared", f"{counted(content['prompts']['made'], 'prompt')}, means and worst clips"),
        (
            "pass",
            f"clips with PSNR {asked['psnr_db']:g} dB, SSIM {asked['ssim']:g} and LPIPS "
            f"{asked['lpips']:g} or better, as serving stacks ask",
        ),
        *(
            [("LPIPS", f"not available: {content['lpips_missing']}")]
            * bool(content["lpips_missing"])
        ),
        *([("note", content["restless"])] if content["restless"] else []),
        *([("refused", refused_rows(content["refused"], len(rows)))] * bool(content["refused"])),
        *notes,
        ("page", str(suite.folder / PAGE)),
        ("to send", f"{suite.folder / TO_SEND}{_hidden(content)}"),
    ]
    print_table(console, facts_table(facts))


def _hidden(content: dict[str, Any]) -> str:
    return "" if content["prompts"]["texts"] else ", without the prompts"


def _cells(row: dict[str, Any], shown: Sequence[str]) -> list[str]:
    summary = row["summary"]
    # Another kernel is taken in a roundabout way, whose time says nothing.
    cells = ["" if row["method"] == FLOOR else f"{summary['speedup']:.2f}"]
    for name in shown:
        found, form = summary[name], FORMS[name]
        none = SAME if name == "psnr_db" else ""
        cells += [none, ""] if found is None else [f"{found[key]:{form}}" for key in found]
    return [*cells, f"{summary['passed']}/{summary['clips']}"]
