"""`chipsparse explain`: what a generation would do, without loading any weight."""

from __future__ import annotations

from dataclasses import dataclass

from chipsparse.cli.errors import results_alone
from chipsparse.cli.options import (
    Device,
    GenerationOptions,
    Positive,
    model_option,
)

EXAMPLE = (
    "Example: [bold]chipsparse explain --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --vram 24G[/bold]"
)


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(GenerationOptions):
    """What the user typed for `explain`; None where an option was left out."""

    device: Device = model_option(
        help="cpu, cuda, cuda:N, or auto: a GPU, be it one that is not here.",
        default="auto",
    )
    gpus: Positive | None = model_option(
        help="GPUs that make it together, be they here or not.", shown="1"
    )
    negative_prompt: None = None


def explain(options: ExplainOptions) -> None:
    """Tell what a generation would do: what runs sparse, how much memory, how much faster.

    Reads the model's configs only; no weight is loaded.
    """
    # Imported here so that --help does not wait for torch and diffusers.
    from chipsparse.cli.explain.explanation import explain as explained
    from chipsparse.cli.model.description import quiet_libraries
    from chipsparse.cli.progress import ProgressDisplay
    from chipsparse.cli.views.terminal import print_result

    with results_alone(), ProgressDisplay() as display, quiet_libraries(debug=options.debug):
        explanation = explained(options, display)
    print_result(explanation, as_json=options.json)
