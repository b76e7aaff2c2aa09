"""The page of a batch, which lies beside its files: a thumbnail of each, with its prompt."""

from __future__ import annotations

from pathlib import Path

from chipsparse.cli.batch.record import Batch
from chipsparse.cli.pages.environment import environment
from chipsparse.cli.pages.names import name_of
from chipsparse.cli.wording import bundled_name


def batch_page(batch: Batch, source: Path) -> str:
    """The page as text.

    Args:
        batch: what became of it.
        source: the file of prompts.
    """
    made = [row for row in batch.rows if row.state in ("made", "already there")]
    return (
        environment()
        .get_template("batch_page.html")
        .render(
            batch=batch,
            source=source.name,
            model=bundled_name(batch.model) or name_of(batch.model),
            made=made,
            failed=[row for row in batch.rows if row.state == "failed"],
            missing=[row for row in batch.rows if row.state == "missing"],
            settings=list(dict.fromkeys(row.settings for row in batch.rows)),
            seconds=sorted(row.seconds for row in made if row.seconds is not None),
        )
    )
