"""The commands of `chipsparse`, each with its example; what they do is imported as they begin.

So neither ``--help`` nor a simple mistake waits for torch and diffusers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chipsparse.cli.batch.options import BatchOptions
from chipsparse.cli.compare.options import CompareOptions
from chipsparse.cli.errors import results_alone
from chipsparse.cli.media.formats import check_file, check_readable
from chipsparse.cli.options import (
    REQUIRED,
    Device,
    GenerateOptions,
    GenerationOptions,
    Positive,
    PrintOptions,
    argument,
    generation_option,
    model_option,
    output_option,
)
from chipsparse.cli.ranks import shared_by
from chipsparse.cli.studio.options import StudioOptions
from chipsparse.cli.tune.options import TuneOptions
from chipsparse.common.files import Write, clip_sources, scratch_folder


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(GenerationOptions):
    """The options of `explain`; None where one was left out."""

    device: Device = model_option(
        help="cpu, cuda, cuda:N, or auto: a GPU, be it one that is not here.",
        default="auto",
    )
    gpus: Positive | None = model_option(
        help="GPUs that make it together, be they here or not.",
        shown="1",
    )
    negative_prompt: None = None

    def check(self) -> None:
        """Raise `UserError` for GPUs that ``--guidance-parallel`` cannot divide."""
        shared_by(self.gpus or 1, self.guidance_parallel)

    def check_contents(self) -> None:
        """Raise `UserError` where the model's files cannot be read."""
        self.check_model_files()


@dataclass(frozen=True, kw_only=True)
class ReportOptions(PrintOptions):
    """The options of `report`."""

    sources: list[Path] = argument(
        help="What generate --report wrote, the results file of tune, what compare --json "
        "printed, or a suite's suite.json. Several make one page.",
        default=REQUIRED,
        metavar="FILE...",
    )
    output: Path = output_option("-o", help="Page to write: .html.", default=REQUIRED, shown=False)
    media: list[Path] | None = generation_option(
        help="Video or image to show frames of (.mp4, .webm, .gif, .png, a folder of .png); "
        "may be given several times.",
        shown="those that the files name",
    )
    json: bool = False

    def check_contents(self) -> None:
        """Raise `UserError` for an unwritable ``--output`` and for unreadable records."""
        check_file("--output", self.output, ".html", ".htm")
        for source in self.sources:
            check_readable("the file", source)

    def reads(self) -> list[Path]:
        """Return the records, and the clips of ``--media``."""
        media = [file for path in self.media or () for file in clip_sources(path)]
        return [*self.sources, *media]

    def writes(self) -> list[Write]:
        """Return the page."""
        return [Write("--output", self.output)]


def generate(options: GenerateOptions) -> None:
    """Make a video or an image from a prompt, or a series of them."""
    from chipsparse.cli.generate.job import run

    run(options)


def batch(options: BatchOptions) -> None:
    """Make a folder of videos or images from a file of prompts.

    Each file is named by a digest of its prompt, seed and settings: the same
    command resumes. manifest.jsonl says what each file is, index.html shows them.
    """
    from chipsparse.cli.batch.job import run

    run(options)


def explain(options: ExplainOptions) -> None:
    """Tell what a generation would do: what runs sparse, how much memory, how much faster.

    Reads the model's configs only; no weight is loaded.
    """
    from chipsparse.cli.explain.explanation import explain as explained
    from chipsparse.cli.request import quiet_display
    from chipsparse.cli.views.terminal import print_result

    with quiet_display(debug=options.debug) as display:
        explanation = explained(options, display)
    print_result(explanation, as_json=options.json)


def tune(options: TuneOptions) -> None:
    """Find a schedule that meets a target of quality or speed, and write it as a profile.

    Scores on a few dense generations which steps can be left out, generates with
    the schedules that look best, each as fast as the others on this device, and
    verifies the winner on other prompts.
    """
    from chipsparse.cli.tune.job import run

    run(options)


def compare(options: CompareOptions) -> None:
    """Compare two files, two configs, or a suite: PSNR, SSIM, LPIPS, flicker, and speed.

    Files (one size and length) are compared frame by frame; lossy ones limit that (all but .png).

    Configs generate the prompts with the same seeds as dense does; each is compared with dense.

    A suite tells in one command whether it holds for your model, and writes a page.
    """
    if options.suite is None and not options.configs:
        from chipsparse.cli.compare.files import compare_files

        return compare_files(options)
    from chipsparse.cli.compare.job import compare_configs, run_suite

    return compare_configs(options) if options.suite is None else run_suite(options)


def report(options: ReportOptions) -> None:
    """Make one HTML page of results: charts, budgets, memory over steps, sample frames.

    The page needs no other file, no network and no scripts.
    """
    from chipsparse.cli.views.report import write_report
    from chipsparse.common.byte_sizes import format_bytes

    with results_alone():
        written = write_report(options.sources, options.media or [], options.output)
    print(f"{options.output} ({format_bytes(written)})")


def studio(options: StudioOptions) -> None:
    """Open a page on this machine: choose, watch the steps, see dense beside sparse.

    The options are the page's defaults. Nothing leaves the machine: no
    analytics, no share link. Ctrl-C ends it.
    """
    with scratch_folder(prefix="chipsparse-studio-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = str(folder)  # which Gradio reads as it is imported
        from chipsparse.cli.studio.page import serve

        serve(options, folder)


def models(options: PrintOptions) -> None:
    """List the models that can run sparse, and what of each."""
    from chipsparse.cli.model.description import quiet_libraries
    from chipsparse.cli.model.listed import list_models
    from chipsparse.cli.views.terminal import print_result

    with quiet_libraries(debug=options.debug):
        listed = list_models()
    print_result(listed, as_json=options.json)


# Each command with the words behind `chipsparse` of its example.
COMMANDS: dict[Callable[[Any], None], str] = {
    generate: 'generate "a red circle moves left" -o out.mp4 --compare',
    batch: "batch prompts.csv -o out --gpus 4",
    explain: "explain --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --vram 24G",
    tune: "tune --min-psnr 30 -o profile.yaml",
    compare: "compare dense profile --count 16 -o worst.mp4",
    report: "report report.json -o report.html",
    studio: "studio --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    models: "models",
}
