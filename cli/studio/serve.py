"""The server of the page: on this machine alone, and quiet towards all others."""

from __future__ import annotations

import os
import tempfile
import threading
import webbrowser
from pathlib import Path

from chipsparse.cli.errors import results_alone, user_errors
from chipsparse.cli.model.description import quiet_libraries
from chipsparse.cli.studio.options import HOST, StudioOptions
from chipsparse.cli.studio.run import Studio
from chipsparse.profiles.profile import ASSETS, bundled_model

INDEXES = {"model_index.json", "modular_model_index.json"}


def serve(options: StudioOptions) -> None:
    """Open the page and wait for a signal that ends it.

    Raises:
        UserError: the model or the device is not here, or the port was taken meanwhile.
    """
    port = options.free_port()
    with (
        results_alone(),
        quiet_libraries(debug=options.debug),
        tempfile.TemporaryDirectory(prefix="chipsparse-studio-") as name,
    ):
        clips = Path(name) / "clips"
        clips.mkdir()
        os.environ["GRADIO_TEMP_DIR"] = str(Path(name) / "shown")  # its copies of what it shows
        with Studio(options, clips) as studio:
            models = models_here(options.model)
            studio.resolve({"model": models[0][1]})  # which refuses before the slow import
            from chipsparse.cli.studio.page import Page, launch

            page = Page(studio, models).blocks
            with user_errors(OSError, what=f"--port {port} could not be opened"):
                launch(page, folder=clips, host=HOST, port=port)
            try:
                address = f"http://{HOST}:{port}"
                print(f"chipsparse studio: {address} (Ctrl-C ends it)", flush=True)
                if options.browser:
                    webbrowser.open(address)
                threading.Event().wait()
            finally:
                page.close(verbose=False)


def models_here(typed: str | None) -> list[tuple[str, str]]:
    """Return the models that can be loaded without a download: names with what ``--model`` takes.

    Args:
        typed: as ``--model`` has it, which comes first; None where it was left out.
    """
    bundled = (bundled_model(), ASSETS / "tiny-flux")
    models = [] if typed is None else [(typed, typed)]
    models += [(f"{folder.name} (bundled)", str(folder)) for folder in bundled]
    return [*models, *((name, name) for name in _cached() if name != typed)]


def _cached() -> list[str]:
    """Return hub names of pipelines in Hugging Face's cache; nothing where there is none."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        repository.repo_id
        for repository in repositories
        if repository.repo_type == "model"
        and any(file.file_name in INDEXES for kept in repository.revisions for file in kept.files)
    )
