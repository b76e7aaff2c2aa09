"""The page in the browser: its fields, what happens when one of them is used, and its server."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from chipsparse.cli.errors import UserError, described, results_alone, user_errors
from chipsparse.cli.model.description import quiet_libraries
from chipsparse.cli.settings import guidance_argument
from chipsparse.cli.studio.options import StudioOptions
from chipsparse.cli.studio.run import Live, Studio
from chipsparse.profiles.profile import ASSETS, BUNDLED_MODELS

# Fonts of this machine: Gradio's own are Google's.
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
TITLE = "<h1>chipsparse studio</h1><p>Everything runs on this machine, and nothing leaves it.</p>"
ALSO = "Also takes a folder, or a name of the Hugging Face hub."
QUALITY = "faithful computes most and is closest to dense, draft computes least."
SECONDS_TO_LOOK = 0.1
NUMBERS = ("height", "width", "frames", "steps", "guidance_scale")
Updates = dict[Any, Any]


def serve(options: StudioOptions, folder: Path) -> None:
    """Open the page, to this machine alone, and wait for a signal that ends it."""
    with results_alone(), quiet_libraries(debug=options.debug):
        studio = Studio(options, folder)
        blocks = page(studio)
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
                css_paths=Path(__file__).with_name("studio.css"),
            )
        try:
            print(f"chipsparse studio: {blocks.local_url.rstrip('/')} (Ctrl-C ends it)", flush=True)
            threading.Event().wait()
        finally:
            blocks.close(verbose=False)
            studio.close()


def page(studio: Studio) -> gr.Blocks:
    """Return the page of a studio; raise `UserError` where its first model cannot be used."""
    with gr.Blocks(title="chipsparse studio", analytics_enabled=False) as blocks:
        gr.HTML(TITLE, elem_classes="cs-title")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                fields = form(studio)
                with gr.Row():
                    generate = gr.Button("Generate", variant="primary", elem_id="generate")
                    stop = gr.Button("Stop", variant="stop", elem_id="stop")
            with gr.Column(scale=3, min_width=320):
                view = gr.HTML(elem_id="view")
                hidden: Any = {"interactive": False, "visible": False}
                slider = gr.ImageSlider(
                    label="dense | sparse", format="png", elem_id="beside", **hidden
                )
                frame = gr.Slider(
                    0, 1, step=1, label="Frame, from 0", visible=False, elem_id="frame"
                )
                label = "The same in a terminal"
                command = gr.Textbox(label=label, buttons=["copy"], elem_id="command", **hidden)

        def choose(model: str) -> Updates:
            """Return what fits another model."""
            try:
                own = dict.fromkeys((*NUMBERS, "negative_prompt"))
                fitted = fitting(studio, {**own, "model": model})
            except UserError as error:
                return {view: Live(described(error)).html()}
            return {view: "", **{fields[name]: gr.update(**fitted[name]) for name in fitted}}

        def still(number: int, request: gr.Request) -> list[Any] | None:
            """Return a frame of both clips, dense and sparse."""
            return still_of(studio.shown(page_of(request)), number)

        def still_of(live: Live, number: int) -> list[Any] | None:
            made = live.made
            if "dense" not in made or "sparse" not in made:
                return None
            number = min(int(number), len(made["sparse"].frames) - 1)
            return [made["dense"].frames[number], made["sparse"].frames[number]]

        def watch(request: gr.Request) -> Iterator[Updates]:
            """Show a page's generation, else the latest one, to its end; also once loaded anew."""
            live, doing = studio.shown(page_of(request)), ""
            while not live.ended:
                if live.doing != doing:
                    doing = live.doing
                    yield {
                        view: live.html(),
                        **dict.fromkeys((slider, frame, command), gr.update(visible=False)),
                        generate: gr.update(interactive=False),
                        stop: gr.update(interactive=True),
                    }
                time.sleep(SECONDS_TO_LOOK)
            worst, pair = live.worst_frame, "dense" in live.clips
            last = len(live.made["sparse"].frames) - 1 if pair else 0
            yield {
                view: live.html(),
                slider: gr.update(value=still_of(live, worst), visible=pair),
                frame: gr.update(value=worst, maximum=max(1, last), visible=last > 0),
                command: gr.update(value=shlex.join(live.command), visible=bool(live.clips)),
                generate: gr.update(interactive=True),
                stop: gr.update(interactive=False),
            }

        def begin(values: Updates, request: gr.Request) -> Iterator[Updates]:
            """Begin a generation, in place of the page's own that still runs, and show it."""
            chosen = {name: values[field] for name, field in fields.items()}
            chosen["seed"] = chosen["seed"] or 0
            chosen["negative_prompt"] = chosen["negative_prompt"] or None
            studio.start(chosen, page_of(request))
            yield from watch(request)

        def end(request: gr.Request) -> None:
            studio.stop(page_of(request))

        def leave(request: gr.Request) -> None:
            studio.leave(page_of(request))

        quiet: Any = {"show_progress": "hidden", "api_visibility": "private"}
        views = [view, slider, frame, command, generate, stop]
        fitted = [*(fields[name] for name in ("model", "quality", *NUMBERS)), view]
        fields["model"].change(choose, fields["model"], fitted, **quiet)
        frame.input(still, frame, slider, trigger_mode="always_last", **quiet)
        # Without a limit: a page that was loaded anew need not wait for what the old one began.
        generate.click(begin, {*fields.values()}, views, concurrency_limit=None, **quiet)
        blocks.load(watch, None, views, concurrency_limit=None, **quiet)
        stop.click(end, queue=False, **quiet)
        blocks.unload(leave)
    return blocks


def page_of(request: gr.Request) -> str:
    """Return the name of the session of a page, which each tab has of its own."""
    return request.session_hash or ""


def form(studio: Studio) -> dict[str, Any]:
    """Return the fields, by the option of `generate` that each is, as they begin."""
    typed = studio.options
    here = [name for name in BUNDLED_MODELS if (ASSETS / name).is_dir()]
    models = [(f"{name} (bundled)", str(ASSETS / name)) for name in here]
    if typed.model is not None:
        models.insert(0, (typed.model, typed.model))
    model = models[0][1]
    first = fitting(studio, {"model": model})
    fields: dict[str, Any] = {
        "model": gr.Dropdown(
            models, value=model, label="Model", allow_custom_value=True, **first["model"]
        ),
        "prompt": gr.Textbox(label="Prompt", lines=3),
        "quality": gr.Radio(label="Quality", info=QUALITY, **first["quality"]),
        "seed": gr.Number(typed.seed, label="Seed", precision=0, minimum=0),
        "compare": gr.Checkbox(True, label="Also make the dense one"),
    }
    with gr.Accordion("More settings", open=False):
        with gr.Row():
            for name in NUMBERS:
                label = name.partition("_")[0].capitalize()
                digits = None if name == "guidance_scale" else 0
                fields[name] = gr.Number(label=label, precision=digits, min_width=90, **first[name])
        negative = gr.Textbox(typed.negative_prompt or "", label="Negative prompt")
        fields["negative_prompt"] = negative
    for name, field in fields.items():
        field.elem_id = name
    return fields


def fitting(studio: Studio, chosen: dict[str, Any]) -> dict[str, Updates]:
    """Return what fields have for a model, and whether the model has them."""
    request = studio.resolve(chosen)
    profile = request.profile
    assert profile is not None
    info = f"{request.model.transformer_class}, {request.dtype_name} on {request.device}. {ALSO}"
    names = list(profile.qualities)
    called = {"frames": "num_frames", "steps": "num_inference_steps"}
    called["guidance_scale"] = guidance_argument(request.model)
    numbers = {name: getattr(request.settings, called.get(name, name)) for name in NUMBERS}
    return {
        "model": {"info": info},
        "quality": {"choices": names, "value": profile.quality, "visible": bool(names)},
        **{name: {"value": v, "visible": v is not None} for name, v in numbers.items()},
    }
