"""`chipsparse studio`: a page in the browser on which one sees what sparse steps do."""

from __future__ import annotations

from chipsparse.cli.studio.options import StudioOptions

EXAMPLE = "Example: [bold]chipsparse studio --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers[/bold]"


def studio(options: StudioOptions) -> None:
    """Open a page on this machine: choose, watch the steps, see dense beside sparse.

    Model, prompt, seed and quality are chosen there; the options are what it begins with.
    Nothing leaves the machine: no analytics, no share link. Ctrl-C ends it.
    """
    # Imported here so that --help does not wait for torch, diffusers and gradio.
    from chipsparse.cli.studio.serve import serve

    serve(options)
