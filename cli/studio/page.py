"""The page in the browser: its fields, what happens when one of them is used, and its server."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from chipsparse.cli.errors import UserError, described, results_alone, user_errors
from chipsparse.cli.model.description import quiet_libraries
from chipsparse.cli.studio.fields import EXAMPLES, RANDOM_SEED, example, fitting, form
from chipsparse.cli.studio.options import StudioOptions
from chipsparse.cli.studio.run import Live, Studio

if TYPE_CHECKING:
    from gradio.events import Dependency

# Fonts of this machine: Gradio's own are Google's.
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
TITLE = "<h1>chipsparse studio</h1><p>Everything runs on this machine, and nothing leaves it.</p>"
NOTHING_YET = '<p class="cs-hint">The result appears here, dense and sparse beside each other.</p>'
# Tells which result of the list was clicked.
CHOOSE = """element.addEventListener('click', event => {
  const chosen = event.target.closest('[data-number]');
  if (chosen) trigger('select', {number: Number(chosen.dataset.number)});
});"""
KEEP = "(...values) => [values]"
SECONDS_TO_LOOK = 0.1
QUIET: Any = {"show_progress": "hidden", "api_visibility": "private"}
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
        Page(studio).listen(blocks)
    return blocks


class Page:
    """The components of the page, and what happens when one of them is used."""

    def __init__(self, studio: Studio) -> None:
        self.studio = studio
        gr.HTML(TITLE, elem_classes="cs-title")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                self._lay_out_fields()
            with gr.Column(scale=3, min_width=320):
                self._lay_out_result()
        # In the browser, in the order of the fields, so that a page that is loaded anew has them.
        # The key ends with the studio, so nothing can be read after that.
        self.kept = gr.BrowserState(storage_key="chipsparse-studio")

    def _lay_out_fields(self) -> None:
        self.fields, self.dice = form(self.studio)
        # Until the page has its fields back, and shows what runs.
        idle: Any = {"interactive": False}
        with gr.Row():
            self.generate = gr.Button("Generate", variant="primary", elem_id="generate", **idle)
            self.stop = gr.Button("Stop", variant="stop", elem_id="stop", **idle)
        self.estimate = gr.HTML(elem_id="estimate", elem_classes="cs-hint", visible=False)

    def _lay_out_result(self) -> None:
        hidden: Any = {"interactive": False, "visible": False}
        self.view = gr.HTML(NOTHING_YET, elem_id="view")
        self.result = gr.HTML(elem_id="result")
        self.slider = gr.ImageSlider(
            label="dense | sparse",
            format="png",
            elem_id="beside",
            **hidden,
        )
        self.frame = gr.Slider(0, 1, step=1, label="Frame, from 0", visible=False, elem_id="frame")
        label = "The same in a terminal"
        self.command = gr.Textbox(label=label, buttons=["copy"], elem_id="command", **hidden)
        self.results = gr.HTML(elem_id="results", js_on_load=CHOOSE)
        self.number = gr.State(0)  # of the result that is shown

    def listen(self, blocks: gr.Blocks) -> None:
        """Say what each event does."""
        fields = self.fields
        each = [*fields.values()]
        shows = [self.number, self.result, self.slider, self.frame, self.command]
        views = [self.view, *shows, self.results, self.generate, self.stop]
        chosen = [fields["model"], fields["prompt"]]
        self._keep_after(fields["model"].input(self.choose, chosen, [*each, self.view], **QUIET))
        # By the browser alone, which needs no answer of the studio.
        self._keep_after(self.dice.click(None, None, fields["seed"], js=RANDOM_SEED, **QUIET))
        typed = [field.input for name, field in fields.items() if name != "model"]
        typed.append(fields["image"].clear)
        self._keep_after(gr.on(typed, None, None, None, trigger_mode="always_last", **QUIET))
        self.frame.input(
            self.still,
            [self.number, self.frame],
            self.slider,
            trigger_mode="always_last",
            **QUIET,
        )
        self.results.select(self.look, None, shows, **QUIET)
        # Without a limit: a page that was loaded anew need not wait for what the old one began.
        unlimited: Any = {"concurrency_limit": None, **QUIET}
        begun = self.generate.click(self.begin, {*each}, views, **unlimited)
        begun.then(self.expect, {*each}, self.estimate, **QUIET)
        restored = blocks.load(self.restore, self.kept, [*each, self.kept], **QUIET)
        restored.then(self.watch, None, views, **unlimited)
        self.stop.click(self.end, queue=False, **QUIET)
        blocks.unload(self.leave)

    def _keep_after(self, event: Dependency) -> None:
        """Keep the fields in the browser after an event, and tell how long they take."""
        each = [*self.fields.values()]
        event.then(None, each, self.kept, js=KEEP, **QUIET)
        event.then(self.expect, {*each}, self.estimate, **QUIET)

    # The fields.

    def held_by(self, values: Updates) -> dict[str, Any]:
        """Return the values of the fields by their names."""
        return {name: values[field] for name, field in self.fields.items()}

    def expect(self, values: Updates) -> Updates:
        """Return how long the fields take, where that is known."""
        return seen(self.studio.estimate(self.held_by(values)))

    def choose(self, model: str, prompt: str) -> Updates:
        """Return what fits another model."""
        try:
            fitted = fitting(self.studio, model)
        except UserError as error:
            return {self.view: seen(Live(described(error)).html())}
        updates = {self.fields[name]: gr.update(**fitted[name]) for name in fitted}
        if prompt in ("", *EXAMPLES.values()):
            updates[self.fields["prompt"]] = example(model)
        return {self.view: seen(""), **updates}

    def restore(self, values: list[Any] | None) -> Updates:
        """Return what the fields held before the page was loaded anew."""
        held = dict(zip(self.fields, values or [], strict=False))
        try:
            fitted = fitting(self.studio, held.get("model") or self.studio.first_model)
        except UserError:  # whose model is gone
            return {self.kept: None}
        updates = {}
        for name, kept in held.items():
            own = fitted.get(name, {})
            value = self.studio.uploaded(kept) if name == "image" else kept
            if own.get("visible", True):
                own = {**own, "value": value}
            updates[self.fields[name]] = gr.update(**own)
        return updates or {self.kept: None}

    # What is shown.

    def still(self, shown: int, place: int) -> list[Any] | None:
        """Return a frame of both clips of a result, dense and sparse."""
        live = self.studio.results.get(shown)
        return None if live is None else still_of(live, place)

    def look(self, event: gr.EventData) -> Updates:
        """Show a result of the list again."""
        live = self.studio.results.get(event.number)
        return {self.number: gr.skip()} if live is None else self.shown(live)

    def shown(self, live: Live) -> Updates:
        """Return what shows a result."""
        worst = live.worst_frame
        pair = "dense" in live.clips
        last = len(live.made["sparse"].frames) - 1 if pair else 0
        return {
            self.number: live.number,
            self.result: live.result_html(),
            self.slider: gr.update(value=still_of(live, worst), visible=pair),
            self.frame: gr.update(value=worst, maximum=max(1, last), visible=last > 0),
            self.command: gr.update(value=shlex.join(live.command), visible=True),
        }

    def begun(self) -> Updates:
        """Return what makes room for a generation; a result of before may be chosen again."""
        hidden = dict.fromkeys((self.slider, self.frame, self.command), gr.update(visible=False))
        return {
            self.result: "",
            **hidden,
            self.generate: gr.update(interactive=False),
            self.stop: gr.update(interactive=True),
        }

    def ended(self, live: Live) -> Updates:
        """Return what shows how a generation ended."""
        html = ""
        if not live.clips:
            html = live.html() if live.doing or live.error else NOTHING_YET
        return {
            self.view: seen(html),
            **(self.shown(live) if live.clips else {}),
            self.results: self.studio.results_html(),
            self.generate: gr.update(interactive=True),
            self.stop: gr.update(interactive=False),
        }

    # Generations.

    def watch(self, request: gr.Request) -> Iterator[Updates]:
        """Show a page's generation, else the latest one, to its end; also once loaded anew."""
        live = self.studio.shown(page_of(request))
        doing = None
        while not live.ended:
            if live.doing != doing:
                first = self.begun() if doing is None else {}
                doing = live.doing
                yield {self.view: seen(live.html()), **first}
            time.sleep(SECONDS_TO_LOOK)
        yield self.ended(live)

    def begin(self, values: Updates, request: gr.Request) -> Iterator[Updates]:
        """Begin a generation, in place of the page's own that still runs, and show it."""
        self.studio.start(self.held_by(values), page_of(request))
        yield from self.watch(request)

    def end(self, request: gr.Request) -> None:
        """Stop this page's generation after its step."""
        self.studio.stop(page_of(request))

    def leave(self, request: gr.Request) -> None:
        """Note that a page was closed: its generation goes on, and any page may stop it."""
        self.studio.leave(page_of(request))


def still_of(live: Live, place: int) -> list[Any] | None:
    """Return a frame of both clips, dense and sparse; None without a dense one."""
    if "dense" not in live.made:
        return None
    place = min(int(place), len(live.made["sparse"].frames) - 1)
    return [live.made["dense"].frames[place], live.made["sparse"].frames[place]]


def seen(html: str) -> Updates:
    """Return an HTML component that takes no room where it is empty."""
    return gr.update(value=html, visible=bool(html))


def page_of(request: gr.Request) -> str:
    """Return the name of the session of a page, which each tab has of its own."""
    return request.session_hash or ""
