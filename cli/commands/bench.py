"""`chipsparse bench`: times of kernels and denoising steps against dense, on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from chipsparse.cli.errors import UserError
from chipsparse.cli.generation_options import GenerationOptions
from chipsparse.cli.options import model_option
from chipsparse.cli.results import results_alone, tell

EXAMPLE = (
    "Example: [bold]chipsparse bench --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --quality fast[/bold]"
)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(GenerationOptions):
    """What the user typed for `bench`; None where an option was left out."""

    kernels: bool = model_option(
        help="Only one layer's attention and MLP, at the model's sizes; needs no weights.",
        default=False,
        before="device",
    )
    random_weights: bool = model_option(
        help="Make the model from its configs alone; its times are the same.",
        default=False,
        before="device",
    )
    flow_shift: None = None
    negative_prompt: None = None

    def check(self) -> None:
        """Raises `UserError` for what is wrong with any model and on any device."""
        super().check()
        if self.kernels and self.random_weights:
            raise UserError("--kernels loads no weights: --random-weights has no effect")
        if self.kernels and self.gpus is not None and self.gpus > 1:
            raise UserError(f"--kernels measures one GPU; leave --gpus {self.gpus} out")


def bench(options: BenchOptions) -> None:
    """Measure on this machine: a layer's operations and whole denoising steps, against dense.

    Every time is a median after a warm-up, and dense runs in the same process.
    """
    # Imported here so that --help does not wait for torch and diffusers.
    from chipsparse.cli.bench.benchmark import run_benchmark
    from chipsparse.cli.bench.text import print_benchmark
    from chipsparse.cli.ranks.joined import check_alone
    from chipsparse.cli.ranks.several import check_profile_shared, taking_part

    if options.kernels:
        check_alone("--kernels")
    process = taking_part("bench", options, check_profile_shared)
    if process is None:
        return
    with results_alone(), process.after_first():
        found = run_benchmark(options, process)
    if process.writes:
        tell(found, print_benchmark, as_json=options.json)
