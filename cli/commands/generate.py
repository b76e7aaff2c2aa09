"""`chipsparse generate`: videos or images from prompts."""

from __future__ import annotations

from chipsparse.cli.options import GenerateOptions

EXAMPLE = 'Example: [bold]chipsparse generate "a red circle moves left" -o out.mp4 --compare[/bold]'


def generate(options: GenerateOptions) -> None:
    """Make a video or an image from a prompt, or a series of them."""
    # Imported here so that neither --help nor a simple mistake waits for torch and diffusers.
    from chipsparse.cli.generate.job import run

    run(options)
