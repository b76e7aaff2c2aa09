"""`chipsparse batch`: a folder of clips from a file of prompts."""

from __future__ import annotations

from chipsparse.cli.batch.options import BatchOptions

EXAMPLE = "Example: [bold]chipsparse batch prompts.csv -o out --gpus 4[/bold]"


def batch(options: BatchOptions) -> None:
    """Make a folder of videos or images from a file of prompts.

    Each file is named by a digest of its prompt, seed and settings, so that the same command goes
    on where it was broken off. manifest.jsonl says what each of them is, index.html shows them.
    """
    # Imported here so that neither --help nor a simple mistake waits for torch and diffusers.
    from chipsparse.cli.batch.job import run

    run(options)
