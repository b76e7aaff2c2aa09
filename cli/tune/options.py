"""The options of `chipsparse tune`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from chipsparse.cli.errors import UserError
from chipsparse.cli.options import (
    REQUIRED,
    GenerationOptions,
    Positive,
    option,
    option_name,
    output_option,
    panel_options,
)

if TYPE_CHECKING:
    from chipsparse.profiles.tuned_range import TunedTarget

TARGET = "Target: one or more of these"
measuring_option = partial(option, panel="Measuring")
target_option = partial(option, panel=TARGET)


@dataclass(frozen=True, kw_only=True)
class TuneOptions(GenerationOptions):
    """What the user typed for `tune`; None where an option was left out."""

    output: Path = output_option(
        "-o",
        help="Profile to write, for [bold]generate --config[/bold].",
        default=REQUIRED,
        shown=False,
    )
    min_psnr: float | None = target_option(
        help="PSNR against dense, in dB, of every held-out prompt, as fast as possible.",
        shown=False,
    )
    min_ssim: float | None = target_option(help="The same with SSIM.", shown=False)
    max_lpips: float | None = target_option(
        help="The same with LPIPS, where the extra lpips and AlexNet's weights are installed.",
        shown=False,
    )
    min_speedup: float | None = target_option(
        help="Dense over sparse time of a generation, as close to dense as possible.", shown=False
    )
    max_seconds: float | None = target_option(
        help="Time of a generation on this device, likewise.", shown=False
    )
    prompts: Path | None = measuring_option(
        help="Text file with one prompt per line; the first ones calibrate, the next ones "
        "verify, and the seed of each is its number from 0.",
        shown="bundled prompts",
    )
    calibration_prompts: Positive = measuring_option(help="Prompts to calibrate with.", default=2)
    held_out_prompts: Positive = measuring_option(help="Other prompts to verify on.", default=4)
    budget: float = measuring_option(
        help="What the search may take, in the time of dense generations.", default=30
    )
    results: Path | None = output_option(
        help="JSON file that keeps every measurement: an interrupted run goes on from it, and "
        "another target uses them, too. The dense clips lie in a folder beside it, "
        "which may be deleted.",
        shown="the output's name with .tune.json",
    )
    quality: None = None

    @property
    def results_file(self) -> Path:
        """Where measurements are kept."""
        return self.results or self.output.with_suffix(".tune.json")

    @property
    def target(self) -> TunedTarget:
        """What is asked for."""
        from chipsparse.profiles.tuned_range import TunedTarget

        return TunedTarget(
            min_psnr_db=self.min_psnr,
            min_ssim=self.min_ssim,
            max_lpips=self.max_lpips,
            min_speedup=self.min_speedup,
            max_seconds=self.max_seconds,
        )

    def check(self) -> None:
        """Raises `UserError` for what is wrong with any model and on any device."""
        self._check_targets()
        # Imported here so that --help does not wait for torch.
        from chipsparse.cli.media.write import check_file, check_inputs_stay, check_writable
        from chipsparse.experiments.store import dense_folder
        from chipsparse.tuning.search import least_budget

        least = least_budget(self.calibration_prompts, self.held_out_prompts)
        if not (math.isfinite(self.budget) and self.budget >= least):
            raise UserError(
                f"--budget {self.budget:g} is too small: {self.calibration_prompts} prompts to "
                f"calibrate with and {self.held_out_prompts} to verify on need at least {least}"
            )
        check_file("--output", self.output, ".yaml", ".yml")
        check_file("--results", self.results_file, ".json")
        for name, output in (("--output", self.output), ("--results", self.results_file)):
            check_inputs_stay(name, output, [self.config, self.prompts])
        folder = dense_folder(self.results_file)
        if folder.is_dir():
            check_writable("the folder", folder / "frames.npy")
        elif folder.exists():
            raise UserError(
                f"{folder}, which keeps the dense clips beside {self.results_file}, is no folder; "
                "move it, or name another file with --results"
            )

    def _check_targets(self) -> None:
        names = panel_options(type(self), TARGET)
        targets = {option_name(name): getattr(self, name) for name in names}
        given = {name: value for name, value in targets.items() if value is not None}
        if not given:
            raise UserError(f"give a target: one or more of {', '.join(targets)}")
        for name, value in given.items():
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name} {value} must be a number above 0")
        if self.min_ssim is not None and self.min_ssim >= 1:
            raise UserError(f"--min-ssim {self.min_ssim:g} must be below 1")
        if self.min_speedup is not None and self.min_speedup <= 1:
            raise UserError(f"--min-speedup {self.min_speedup:g} must be above 1")

    def kept(self) -> str:
        """What an interruption leaves."""
        known = f"what was measured is in {self.results_file}: run it again"
        return known if self.results_file.is_file() else "nothing was measured"
