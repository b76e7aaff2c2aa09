"""The server of the page: on this machine alone, and quiet towards all others."""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chipsparse.cli.commands.studio import DEFAULT_PORT, StudioOptions
from chipsparse.cli.errors import UserError, user_errors

HOST = "127.0.0.1"
# Where Gradio keeps copies of what it shows.
GRADIO_FOLDER = "GRADIO_TEMP_DIR"


def check_library() -> None:
    """Raises `UserError` where Gradio is not installed."""
    if importlib.util.find_spec("gradio") is None:
        raise UserError(
            "the studio needs gradio, which is not installed: pip install 'chipsparse[studio]'"
        )


def check_port_is_free(port: int) -> int:
    """The port, or a free one for 0; raises `UserError` where another program has it."""
    with socket.socket() as probe:
        # As the server does, so that a port whose last connections linger counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            other = "" if port == DEFAULT_PORT else f", such as {DEFAULT_PORT}"
            raise UserError(
                f"--port {port} is in use or not allowed here; name another one{other}, or 0 for "
                "any that is free"
            ) from error
        return int(probe.getsockname()[1])


def serve(options: StudioOptions, port: int) -> None:
    """Opens the page and waits for a signal that ends it.

    Raises:
        UserError: the model or the device is not here, or the port was taken meanwhile.
    """
    from chipsparse.cli.model.description import quiet_libraries
    from chipsparse.cli.studio.choices import Choices, models_here
    from chipsparse.cli.studio.studio import Studio
    from chipsparse.common.scratch import scratch_folder

    with (
        quiet_libraries(debug=options.debug),
        scratch_folder(Path(tempfile.gettempdir())) as folder,
        _gradio_keeps_to(folder / "shown"),
        Studio(options, folder) as studio,
    ):
        models = models_here(options.model)
        first = studio.settle(Choices.typed(options, models[0][1]))
        from chipsparse.cli.studio.page import Page, launch  # slow to import

        page = Page(studio, models, first).blocks
        with user_errors(OSError, what=f"--port {port} could not be opened"):
            launch(page, folder=folder, host=HOST, port=port)
        try:
            address = f"http://{HOST}:{port}"
            print(f"chipsparse studio: {address} (Ctrl-C ends it)", flush=True)
            if options.browser:
                webbrowser.open(address)
            threading.Event().wait()
        finally:
            page.close(verbose=False)


@contextmanager
def _gradio_keeps_to(folder: Path) -> Iterator[None]:
    before = os.environ.get(GRADIO_FOLDER)
    os.environ[GRADIO_FOLDER] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[GRADIO_FOLDER]
        else:
            os.environ[GRADIO_FOLDER] = before
