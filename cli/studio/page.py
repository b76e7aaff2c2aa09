"""The page in the browser: its fields, what happens when one of them is used, and its server."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from chipsparse.cli.errors import UserError, described, results_alone, user_errors
from chipsparse.cli.model.description import quiet_libraries
from chipsparse.cli.request import Request
from chipsparse.cli.settings import guidance_argument
from chipsparse.cli.studio.options import StudioOptions
from chipsparse.cli.studio.run import Live, Studio
from chipsparse.cli.studio.view import shown
from chipsparse.profiles.profile import ASSETS, bundled_model
from chipsparse.profiles.qualities import QUALITIES

NUMBERS = ("height", "width", "frames", "steps", "guidance_scale")
# Fonts of this machine: Gradio's own are Google's.
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
TITLE = "<h1>chipsparse studio</h1><p>Everything runs on this machine, and nothing leaves it.</p>"
Updates = dict[Any, Any]


def serve(options: StudioOptions, folder: Path) -> None:
    """Open the page, to this machine alone, and wait for a signal that ends it.

    Args:
        folder: for what is made, an empty one.

    Raises:
        UserError: the model or the device is not here, or the port is taken.
    """
    with (
        results_alone(),
        quiet_libraries(debug=options.debug),
        Studio(options, folder) as studio,
    ):
        blocks = Page(studio).blocks
        with user_errors(OSError, what=f"--port {options.port} could not be opened"):
            blocks.launch(
                server_name="127.0.0.1",
                server_port=options.port or None,
                inbrowser=options.browser,
                share=False,
                quiet=True,
                prevent_thread_lock=True,
                footer_links=[],
                ssr_mode=False,
                allowed_paths=[str(folder)],
                theme=gr.themes.Default(primary_hue="blue", **FONTS),
                css=Path(__file__).with_name("studio.css").read_text(encoding="utf-8"),
            )
        try:
            address = blocks.local_url.rstrip("/")
            print(f"chipsparse studio: {address} (Ctrl-C ends it)", flush=True)
            threading.Event().wait()
        finally:
            blocks.close(verbose=False)


class Page:
    """The page of a studio; raises `UserError` where its first model cannot be used."""

    def __init__(self, studio: Studio) -> None:
        self._studio, typed = studio, studio.options
        self._last = Live()  # generation that has a result
        bundled = [(f"{f.name} (bundled)", str(f)) for f in (bundled_model(), ASSETS / "tiny-flux")]
        models = [*([(typed.model, typed.model)] if typed.model else []), *bundled]
        first = _fitting(studio.resolve({"model": models[0][1]}))
        with gr.Blocks(title="chipsparse studio", analytics_enabled=False) as self.blocks:
            gr.HTML(TITLE, elem_classes="cs-title")
            with gr.Row():
                with gr.Column(scale=2, min_width=320):
                    self._add_fields(models, first)
                with gr.Column(scale=3, min_width=320):
                    self._add_views()
            self._connect()

    def _add_fields(self, models: list[tuple[str, str]], first: dict[str, Updates]) -> None:
        typed = self._studio.options
        self._fields: dict[str, Any] = {
            "model": gr.Dropdown(
                models,
                value=models[0][1],
                label="Model",
                allow_custom_value=True,
                elem_id="model",
                **first["model"],
            ),
            "prompt": gr.Textbox(label="Prompt", lines=3, elem_id="prompt"),
            "quality": gr.Radio(
                label="Quality",
                info="faithful computes most and is closest to dense, fast computes least.",
                elem_id="quality",
                **first["quality"],
            ),
            "seed": gr.Number(typed.seed, label="Seed", precision=0, minimum=0, elem_id="seed"),
            "compare": gr.Checkbox(True, label="Also make the dense one", elem_id="compare"),
        }
        with gr.Accordion("More settings", open=False):
            with gr.Row():
                for name in NUMBERS:
                    self._fields[name] = gr.Number(
                        label=name.partition("_")[0].capitalize(),
                        precision=None if name == "guidance_scale" else 0,
                        min_width=90,
                        elem_id=name,
                        **first[name],
                    )
            negative = gr.Textbox(typed.negative_prompt or "", label="Negative prompt")
            self._fields["negative_prompt"] = negative
        with gr.Row():
            self._generate = gr.Button("Generate", variant="primary", elem_id="generate")
            self._stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="stop")

    def _add_views(self) -> None:
        self._view = gr.HTML(elem_id="view")
        hidden: Any = {"interactive": False, "visible": False}
        self._slider = gr.ImageSlider(
            label="dense | sparse", format="png", elem_id="beside", **hidden
        )
        self._frame = gr.Slider(0, 1, step=1, label="Frame, from 0", visible=False, elem_id="frame")
        self._command = gr.Textbox(
            label="The same in a terminal", lines=2, buttons=["copy"], elem_id="command", **hidden
        )

    def _connect(self) -> None:
        fields, quiet = self._fields, {"show_progress": "hidden", "api_visibility": "private"}
        views = [
            self._view, self._slider, self._frame, self._command, self._generate, self._stop,
        ]  # fmt: skip
        fitted = [fields[name] for name in ("model", "quality", *NUMBERS)]
        made: dict[str, Any] = {"inputs": {*fields.values()}, "outputs": views, **quiet}
        fields["model"].change(self._chosen, fields["model"], [*fitted, self._view], **quiet)
        # Without a limit: a page that was loaded anew need not wait for what the old one began.
        self._generate.click(self._made, concurrency_limit=None, **made)
        self._frame.input(self._at, self._frame, self._slider, trigger_mode="always_last", **quiet)
        self._stop.click(self._studio.stop, queue=False, **quiet)
        self.blocks.load(self._finished, None, views, **quiet)

    def _chosen(self, model: str) -> Updates:
        """Return what fits another model."""
        try:
            own = dict.fromkeys((*NUMBERS, "negative_prompt"))
            fitting = _fitting(self._studio.resolve({**own, "model": model}))
        except UserError as error:
            return {self._view: shown(Live(error=described(error)))}
        updates: Updates = {self._fields[name]: gr.update(**fitting[name]) for name in fitting}
        return {**updates, self._view: ""}

    def _made(self, values: Updates) -> Iterator[Updates]:
        """Begin a generation, and show it to its end."""
        chosen = {name: values[field] for name, field in self._fields.items()}
        chosen["seed"] = int(chosen["seed"] or 0)
        chosen["prompt"] = chosen["prompt"].strip()
        chosen["negative_prompt"] = chosen["negative_prompt"].strip() or None
        live, hidden = self._studio.start(chosen), gr.update(visible=False)
        yield {
            **dict.fromkeys((self._slider, self._frame, self._command), hidden),
            self._generate: gr.update(interactive=False),
            self._stop: gr.update(interactive=True),
        }
        while not live.ended:
            live.changed.wait()
            live.changed.clear()
            yield {self._view: shown(live)}
        self._last = self._last if live.result is None else live
        yield {
            **({self._view: shown(live)} if live.result is None else self._finished()),
            self._generate: gr.update(interactive=True),
            self._stop: gr.update(interactive=False),
        }

    def _finished(self) -> Updates:
        """Return what the last result shows; also on a page that is loaded anew."""
        made = self._last.result
        if made is None:
            return {self._view: ""}
        frames, dense = len(made.sparse.frames), made.dense is not None
        return {
            self._view: shown(self._last),
            self._slider: gr.update(value=self._at(made.worst_frame), visible=dense),
            self._frame: gr.update(
                value=made.worst_frame, maximum=max(1, frames - 1), visible=dense and frames > 1
            ),
            self._command: gr.update(value=shlex.join(made.command), visible=True),
        }

    def _at(self, frame: int) -> tuple[Any, Any] | None:
        """Return a frame of both clips."""
        made = self._last.result
        if made is None or made.dense is None:
            return None
        place = min(int(frame), len(made.sparse.frames) - 1)
        return made.dense.frames[place], made.sparse.frames[place]


def _fitting(request: Request) -> dict[str, Updates]:
    """Return what fields have for a model, and whether the model has them."""
    profile, settings = request.profile, request.settings
    assert profile is not None
    names = [name for name in QUALITIES if name in profile.qualities]
    dtype = str(request.dtype).removeprefix("torch.")
    model = f"{request.model.transformer_class}, {dtype} on {request.device}."
    fields = {"frames": "num_frames", "steps": "num_inference_steps"}
    fields["guidance_scale"] = guidance_argument(request.model)
    numbers = {name: getattr(settings, fields.get(name, name)) for name in NUMBERS}
    quality = profile.quality if names else None
    return {
        "model": {"info": f"{model} Also takes a folder, or a name of the Hugging Face hub."},
        "quality": {"choices": names, "value": quality, "visible": bool(names)},
        **{name: {"value": v, "visible": v is not None} for name, v in numbers.items()},
    }
