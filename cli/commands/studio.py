"""`chipsparse studio`: a page in the browser on which one sees what sparse steps do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from chipsparse.cli.studio.options import StudioOptions

EXAMPLE = "Example: [bold]chipsparse studio --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers[/bold]"


def studio(options: StudioOptions) -> None:
    """Open a page on this machine: choose, watch the steps, see dense beside sparse.

    Model, prompt, seed and quality are chosen there; the options are what it begins with.
    Nothing leaves the machine: no analytics, no share link. Ctrl-C ends it.
    """
    with tempfile.TemporaryDirectory(prefix="chipsparse-studio-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder  # which Gradio reads as it is imported
        # Imported here so that --help does not wait for torch, diffusers and gradio.
        from chipsparse.cli.studio.page import serve

        serve(options, Path(folder))
