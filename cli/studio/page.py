"""The page: its fields, and what happens when one of them is used."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from chipsparse.cli.errors import UserError, described
from chipsparse.cli.request import Request
from chipsparse.cli.settings import guidance_argument
from chipsparse.cli.studio import view
from chipsparse.cli.studio.run import Moment, Result, Studio
from chipsparse.profiles.qualities import QUALITIES

FONT = ["system-ui", "sans-serif"]  # those of this machine: Gradio's own are Google's
NUMBERS = {
    "height": "Height",
    "width": "Width",
    "frames": "Frames",
    "steps": "Steps",
    "guidance_scale": "Guidance",
}
LABELS = {**NUMBERS, "model": "Model", "seed": "Seed", "negative_prompt": "Negative prompt"}
OPTION = re.compile(r"--([a-z][a-z-]*)")
TITLE = "<h1>chipsparse studio</h1><p>Everything runs on this machine, and nothing leaves it.</p>"
Updates = dict[Any, Any]


class Page:
    """The page of a studio.

    Args:
        models: that are offered, the one that is chosen first: names with their locations.
    """

    def __init__(self, studio: Studio, models: Sequence[tuple[str, str]]) -> None:
        self._studio = studio
        self._result: Result | None = None
        model = models[0][1]
        first = _fitting(studio.resolve({"model": model}))
        with gr.Blocks(
            title="chipsparse studio", analytics_enabled=False, delete_cache=(3600, 3600)
        ) as self.blocks:
            gr.HTML(TITLE, elem_classes="cs-title")
            with gr.Row():
                with gr.Column(scale=2, min_width=320):
                    self._add_fields(models, model, first)
                with gr.Column(scale=3, min_width=320):
                    self._add_views()
            self._connect()

    def _add_fields(
        self, models: Sequence[tuple[str, str]], model: str, first: dict[str, Updates]
    ) -> None:
        typed = self._studio.options
        self._fields: dict[str, Any] = {
            "model": gr.Dropdown(
                models,
                value=model,
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
            "compare": gr.Checkbox(
                True, label="Also make the dense one, and compare", elem_id="compare"
            ),
        }
        with gr.Accordion("More settings", open=False):
            with gr.Row():
                for name, label in NUMBERS.items():
                    precision = None if name == "guidance_scale" else 0
                    self._fields[name] = gr.Number(
                        label=label, precision=precision, min_width=90, elem_id=name, **first[name]
                    )
            negative = gr.Textbox(typed.negative_prompt or "", label="Negative prompt")
            self._fields["negative_prompt"] = negative
        with gr.Row():
            self._generate = gr.Button("Generate", variant="primary", elem_id="generate")
            self._stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="stop")

    def _add_views(self) -> None:
        self._moment = gr.HTML(elem_id="moment")
        with gr.Column(visible=False) as self._results:
            self._numbers = gr.HTML(elem_id="result")
            self._slider = gr.ImageSlider(
                label="dense | sparse",
                format="png",
                interactive=False,
                buttons=["download", "fullscreen"],
                elem_id="beside",
            )
            self._frame = gr.Slider(0, 1, step=1, label="Frame, from 0", elem_id="frame")
            shown = {"loop": True, "autoplay": True, "interactive": False, "min_width": 200}
            with gr.Row():
                self._videos = {
                    way: gr.Video(label=way, elem_id=f"video-{way}", **shown)
                    for way in ("dense", "sparse")
                }
            self._image = gr.Image(label="sparse", interactive=False, format="png", elem_id="image")
            self._profile = gr.DownloadButton("Save the profile", elem_id="profile")
            self._command = gr.Textbox(
                label="The same in a terminal",
                lines=2,
                max_lines=8,
                interactive=False,
                buttons=["copy"],
                elem_id="command",
            )

    def _connect(self) -> None:
        fields = self._fields
        views = [
            self._moment, self._results, self._numbers, self._slider, self._frame,
            *self._videos.values(), self._image, self._profile, self._command, self._generate,
            self._stop,
        ]  # fmt: skip
        quiet: Any = {"show_progress": "hidden", "api_visibility": "private"}
        fitted = [fields[name] for name in ("model", "quality", *NUMBERS)]
        fields["model"].change(self._chosen, [fields["model"]], [*fitted, self._moment], **quiet)
        # Without a limit: a page that was loaded anew need not wait for what the old one began.
        self._generate.click(
            self._made, set(fields.values()), views, concurrency_limit=None, **quiet
        )
        self.blocks.load(lambda: self._finished(self._result), None, views, **quiet)
        self._stop.click(self._studio.stop, queue=False, **quiet)
        self._frame.input(
            self._at, [self._frame], [self._slider], trigger_mode="always_last", **quiet
        )

    def _chosen(self, model: str) -> Updates:
        """Return what fits another model."""
        try:
            fitting = _fitting(
                self._studio.resolve(dict.fromkeys(LABELS) | {"model": model, "seed": 0})
            )
        except UserError as error:
            return {self._moment: _shown(Moment(error=described(error)))}
        updates: Updates = {self._fields[name]: gr.update(**fitting[name]) for name in fitting}
        return {**updates, self._moment: ""}

    def _made(self, values: Updates) -> Iterator[Updates]:
        """Begin a generation, and show it to its end."""
        chosen = {name: values[field] for name, field in self._fields.items()}
        chosen["seed"] = int(chosen["seed"] or 0)
        chosen["prompt"] = chosen["prompt"].strip()
        chosen["negative_prompt"] = chosen["negative_prompt"].strip() or None
        events = self._studio.start(chosen)
        yield {
            self._moment: _shown(Moment("starting")),
            self._results: gr.update(visible=False),
            self._generate: gr.update(interactive=False),
            self._stop: gr.update(interactive=True),
        }
        now = Moment()
        while not now.ended:
            now = events.get()
            while not now.ended and not events.empty():  # a slow browser sees the latest
                now = events.get()
            if now.result is None:
                yield {self._moment: _shown(now)}
        self._result = now.result or self._result
        yield {
            **({} if now.result is None else self._finished(now.result)),
            self._generate: gr.update(interactive=True),
            self._stop: gr.update(interactive=False),
        }

    def _finished(self, made: Result | None) -> Updates:
        """Return what a result shows; also on a page that is loaded anew."""
        if made is None:
            return {self._results: gr.update(visible=False)}
        frames, dense = len(made.sparse.frames), made.dense is not None
        video = made.clips["sparse"].suffix == ".mp4"
        clips: dict[str, str] = {way: str(file) for way, file in made.clips.items()}
        return {
            self._moment: gr.update(visible=False),
            self._results: gr.update(visible=True),
            self._numbers: view.result(made),
            self._slider: gr.update(value=self._at(made.worst_frame, made), visible=dense),
            self._frame: gr.update(
                value=made.worst_frame, maximum=max(1, frames - 1), visible=dense and frames > 1
            ),
            **{
                field: gr.update(
                    value=clips.get(way) if video else None, visible=video and way in clips
                )
                for way, field in self._videos.items()
            },
            self._image: gr.update(
                value=None if video or dense else clips["sparse"], visible=not video and not dense
            ),
            self._profile: str(made.profile),
            self._command: shlex.join(made.command),
        }

    def _at(self, frame: int, made: Result | None = None) -> tuple[Any, Any] | None:
        """Return a frame of both clips."""
        made = made or self._result
        if made is None or made.dense is None:
            return None
        place = min(int(frame), len(made.sparse.frames) - 1)
        return made.dense.frames[place], made.sparse.frames[place]


def _shown(moment: Moment) -> Any:
    """Return a moment, with the names of the fields for those of the options."""
    text = view.moment(moment)
    named = OPTION.sub(lambda match: LABELS.get(match[1].replace("-", "_"), match[0]), text)
    return gr.update(value=named, visible=True)


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
    return {
        "model": {"info": f"{model} Also takes a folder, or a name of the Hugging Face hub."},
        "quality": {
            "choices": names,
            "value": profile.quality if names else None,
            "visible": bool(names),
        },
        **{name: {"value": v, "visible": v is not None} for name, v in numbers.items()},
    }


def launch(page: gr.Blocks, *, folder: Path, host: str, port: int) -> None:
    """Serve a page, to this machine alone and without anything from others.

    Args:
        folder: whose files it may show.

    Raises:
        OSError: the port is taken.
    """
    page.launch(
        server_name=host,
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        footer_links=[],
        run_history=False,
        mcp_server=False,
        ssr_mode=False,
        allowed_paths=[str(folder)],
        theme=gr.themes.Default(
            primary_hue="blue", font=FONT, font_mono=["ui-monospace", "monospace"]
        ),
        css=view.style(),
    )
