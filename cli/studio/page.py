"""The page: its fields, and what happens when one of them is used."""

from __future__ import annotations

import dataclasses
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
from chipsparse.cli.studio.choices import Choices
from chipsparse.cli.studio.feed import Shown
from chipsparse.cli.studio.maker import Result
from chipsparse.cli.studio.studio import BrokenOff, Studio
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
Updates = dict[Any, Any]


class Page:
    """The page of a studio.

    Args:
        models: that are offered, the one that is chosen first: names with their locations.
        job: what would be made at first.
    """

    def __init__(self, studio: Studio, models: Sequence[tuple[str, str]], job: Request) -> None:
        self._studio = studio
        self._result: Result | None = None
        first = Choices.typed(studio.options, models[0][1])
        with gr.Blocks(
            title="chipsparse studio", analytics_enabled=False, delete_cache=(3600, 3600)
        ) as self.blocks:
            gr.HTML(
                "<h1>chipsparse studio</h1><p>Everything runs on this machine, and nothing leaves "
                "it.</p>",
                elem_classes="cs-title",
            )
            with gr.Row():
                with gr.Column(scale=2, min_width=320):
                    self._fields(models, first, job)
                with gr.Column(scale=3, min_width=320):
                    self._views()
        with self.blocks:
            self._events()

    def _fields(self, models: Sequence[tuple[str, str]], first: Choices, job: Request) -> None:
        self._model = gr.Dropdown(
            models,
            value=first.model,
            label="Model",
            info=_about(job),
            allow_custom_value=True,
            elem_id="model",
        )
        self._prompt = gr.Textbox(label="Prompt", lines=3, elem_id="prompt")
        self._quality = gr.Radio(
            **_qualities(job),
            label="Quality",
            info="faithful computes most and is closest to dense, fast computes least.",
            elem_id="quality",
        )
        self._seed = gr.Number(first.seed, label="Seed", precision=0, minimum=0, elem_id="seed")
        self._compare = gr.Checkbox(
            True, label="Also make the dense one, and compare", elem_id="compare"
        )
        with gr.Accordion("More settings", open=False):
            with gr.Row():
                self._numbers = {
                    name: gr.Number(
                        label=label,
                        precision=None if name == "guidance_scale" else 0,
                        min_width=90,
                        elem_id=name,
                        **_number(name, job),
                    )
                    for name, label in NUMBERS.items()
                }
            self._negative = gr.Textbox(first.negative_prompt or "", label="Negative prompt")
        with gr.Row():
            self._generate = gr.Button("Generate", variant="primary", elem_id="generate")
            self._stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="stop")

    def _views(self) -> None:
        self._moment = gr.HTML(elem_id="moment")
        with gr.Column(visible=False) as self._results:
            self._numbers_of = gr.HTML(elem_id="result")
            self._slider = gr.ImageSlider(
                label="dense | sparse",
                format="png",
                interactive=False,
                buttons=["download", "fullscreen"],
                elem_id="beside",
            )
            self._frame = gr.Slider(0, 1, step=1, label="Frame, from 0", elem_id="frame")
            with gr.Row():
                self._videos = {
                    way: gr.Video(
                        label=way,
                        loop=True,
                        autoplay=True,
                        interactive=False,
                        min_width=200,
                        elem_id=f"video-{way}",
                    )
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

    def _events(self) -> None:
        fields = [
            self._model, self._prompt, self._quality, self._seed, self._compare,
            *self._numbers.values(), self._negative,
        ]  # fmt: skip
        views = [
            self._moment, self._results, self._numbers_of, self._slider, self._frame,
            *self._videos.values(), self._image, self._profile, self._command, self._generate,
            self._stop,
        ]  # fmt: skip
        quiet = {"show_progress": "hidden", "api_visibility": "private"}
        self._model.change(
            self._chosen,
            [self._model],
            [self._model, self._quality, *self._numbers.values(), self._moment],
            **quiet,
        )
        # Without a limit: a page that was loaded anew need not wait for what the old one began.
        self._generate.click(self._made, set(fields), views, concurrency_limit=None, **quiet)
        self.blocks.load(self._loaded, None, views, **quiet)
        self._stop.click(self._studio.stop, queue=False, **quiet)
        self._frame.input(
            self._at, [self._frame], [self._slider], trigger_mode="always_last", **quiet
        )

    def _chosen(self, model: str) -> Updates:
        """What fits another model."""
        try:
            job = self._studio.settle(Choices(model=model))
        except UserError as error:
            return {
                self._moment: gr.update(
                    value=view.moment(Shown(""), error=_named(described(error))), visible=True
                )
            }
        return {
            self._model: gr.update(info=_about(job)),
            self._quality: gr.update(**_qualities(job)),
            self._moment: "",
            **{field: gr.update(**_number(name, job)) for name, field in self._numbers.items()},
        }

    def _made(self, values: dict[Any, Any]) -> Iterator[Updates]:
        """Begins a generation, and shows it to its end."""
        events = self._studio.start(self._choices(values))
        yield {
            self._moment: gr.update(value=view.moment(Shown("starting")), visible=True),
            self._results: gr.update(visible=False),
            self._generate: gr.update(interactive=False),
            self._stop: gr.update(interactive=True),
        }
        news = events.get()
        while isinstance(news, Shown):
            while isinstance(news, Shown) and not events.empty():  # a slow browser sees the latest
                news = events.get()
            if isinstance(news, Shown):
                yield {self._moment: view.moment(news)}
                news = events.get()
        yield {
            **(self._ended(news) if isinstance(news, BrokenOff) else self._finished(news)),
            self._generate: gr.update(interactive=True),
            self._stop: gr.update(interactive=False),
        }

    def _choices(self, values: dict[Any, Any]) -> Choices:
        return Choices(
            model=values[self._model],
            prompt=values[self._prompt].strip(),
            seed=int(values[self._seed] or 0),
            quality=values[self._quality],
            compare=values[self._compare],
            negative_prompt=values[self._negative].strip() or None,
            **{name: values[field] for name, field in self._numbers.items()},
        )

    def _ended(self, end: BrokenOff) -> Updates:
        if end.why is not None:
            return {self._moment: view.moment(Shown("", runs=end.last.runs), error=_named(end.why))}
        return {self._moment: view.moment(dataclasses.replace(end.last, stage="stopped", clock=""))}

    def _loaded(self) -> Updates:
        """What a page that is loaded anew shows: what was made last."""
        if self._result is None:
            return {self._results: gr.update(visible=False)}
        return self._finished(self._result)

    def _finished(self, made: Result) -> Updates:
        self._result = made
        video, dense = made.video, made.dense is not None
        return {
            self._moment: gr.update(visible=False),
            self._results: gr.update(visible=True),
            self._numbers_of: view.result(made),
            self._slider: gr.update(value=self._at(made.worst_frame), visible=dense),
            self._frame: gr.update(
                value=made.worst_frame,
                maximum=max(1, len(made.sparse.frames) - 1),
                visible=dense and len(made.sparse.frames) > 1,
            ),
            **{
                field: gr.update(
                    value=str(made.clips[way]) if video and way in made.clips else None,
                    visible=video and way in made.clips,
                )
                for way, field in self._videos.items()
            },
            self._image: gr.update(
                value=None if video or dense else str(made.clips["sparse"]),
                visible=not video and not dense,
            ),
            self._profile: str(made.profile),
            self._command: shlex.join(made.request.command),
        }

    def _at(self, frame: int) -> tuple[str, str] | None:
        """A frame of both clips, as files."""
        made = self._result
        if made is None or made.dense is None:
            return None
        place = min(int(frame), len(made.sparse.frames) - 1)
        return str(made.still("dense", place)), str(made.still("sparse", place))


def _about(job: Request) -> str:
    """About a model."""
    dtype = str(job.dtype).removeprefix("torch.")
    return (
        f"{job.model.transformer_class}, {dtype} on {job.device}. Also takes a folder, or a "
        "name of the Hugging Face hub."
    )


def _qualities(job: Request) -> Updates:
    """Those of a model's profile; nothing to choose where it has none."""
    assert job.profile is not None
    names = [name for name in QUALITIES if name in job.profile.qualities]
    return {
        "choices": names,
        "value": job.profile.quality if names else None,
        "visible": bool(names),
    }


def _number(name: str, job: Request) -> Updates:
    """What a field of a number begins with, and whether the model has it."""
    settings = {"frames": "num_frames", "steps": "num_inference_steps"}
    settings["guidance_scale"] = guidance_argument(job.model)
    value = getattr(job.settings, settings.get(name, name))
    return {"value": value, "visible": value is not None}


def _named(sentence: str) -> str:
    """A sentence with the names of the fields for those of the options."""
    return OPTION.sub(lambda found: LABELS.get(found[1].replace("-", "_"), found[0]), sentence)


def launch(page: gr.Blocks, *, folder: Path, host: str, port: int) -> None:
    """Serves a page, to this machine alone and without anything from others.

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
