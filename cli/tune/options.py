"""The options of `chipsparse tune`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from annotated_types import Interval

from chipsparse.cli.errors import UserError
from chipsparse.cli.media.formats import check_file
from chipsparse.cli.options import REQUIRED, GenerationOptions, Positive, option, output_option
from chipsparse.cli.prompts import read_prompts
from chipsparse.cli.ranks import this_rank
from chipsparse.common.files import Write

measuring_option = partial(option, panel="Measuring")
Above0 = Annotated[float, Interval(gt=0)]
Above1 = Annotated[float, Interval(gt=1)]
Below1 = Annotated[float, Interval(gt=0, lt=1)]
target_option = partial(option, panel="Target: one or more of these", shown=False)


@dataclass(frozen=True, kw_only=True)
class TuneOptions(GenerationOptions):
    """The options that the user typed; None where one was left out."""

    output: Path = output_option(
        "-o",
        help="Profile to write, for generate --config.",
        default=REQUIRED,
        shown=False,
    )
    min_psnr: Above0 | None = target_option(
        help="PSNR against dense, in dB, of every held-out prompt, as fast as possible.",
    )
    min_ssim: Below1 | None = target_option(help="The same with SSIM.")
    max_lpips: Above0 | None = target_option(
        help="The same with LPIPS, where the extra lpips and AlexNet's weights are installed.",
    )
    min_speedup: Above1 | None = target_option(
        help="Dense over sparse time of a generation, as close to dense as possible.",
    )
    max_seconds: Above0 | None = target_option(
        help="Time of a generation on this device, likewise.",
    )
    prompts: Path | None = measuring_option(
        help="Text file with one prompt a line, or bundled ones: shapes, images or suite. The "
        "first ones calibrate, the next ones verify, and the seed of each is its number from 0.",
        shown="bundled prompts",
    )
    calibration_prompts: Positive = measuring_option(help="Prompts to calibrate with.", default=2)
    held_out_prompts: Positive = measuring_option(help="Other prompts to verify on.", default=4)
    budget: float = measuring_option(
        help="What the search may take, in the time of dense generations.",
        default=30,
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
        """The file of all measurements, by default next to the profile."""
        return self.results or self.output.with_suffix(".tune.json")

    @property
    def target(self) -> dict[str, float | None]:
        """The bounds by name, in dB, as a factor or in seconds; None is no bound."""
        return {
            "min_psnr_db": self.min_psnr,
            "min_ssim": self.min_ssim,
            "max_lpips": self.max_lpips,
            "min_speedup": self.min_speedup,
            "max_seconds": self.max_seconds,
        }

    def check(self) -> None:
        """Raise `UserError` without a target, and for a budget below the least."""
        # Imported here so that --help does not wait for torch.
        from chipsparse.tuning.search import least_budget

        if not any(self.target.values()):
            names = "--min-psnr, --min-ssim, --max-lpips, --min-speedup, --max-seconds"
            raise UserError(f"give a target: one or more of {names}")
        least = least_budget(self.calibration_prompts, self.held_out_prompts)
        if self.budget < least:
            raise UserError(
                f"--budget {self.budget:g} is too small: {self.calibration_prompts} prompts to "
                f"calibrate with and {self.held_out_prompts} to verify on need at least {least}",
            )
        check_file("--output", self.output, ".yaml", ".yml")
        check_file("--results", self.results_file, ".json")
        this_rank(self.gpus, self.guidance_parallel)

    def check_contents(self) -> None:
        """Raise `UserError` for an unreadable file of prompts or model."""
        if self.prompts is not None:
            read_prompts(self.prompts)
        self.check_model_files()

    def reads(self) -> list[Path]:
        """Return also the file of prompts."""
        return [*super().reads(), *([] if self.prompts is None else [self.prompts])]

    def writes(self) -> list[Write]:
        """Return the profile, the measurements, and the dense clips next to these."""
        dense = self.results_file.with_name(f"{self.results_file.stem}-dense")
        return [
            Write("--output", self.output),
            Write("--results", self.results_file),
            *(Write("--results", file) for file in dense.glob("*")),
        ]

    def kept(self) -> str:
        """Return where the measurements are, which another run continues."""
        known = f"what was measured is in {self.results_file}: run it again"
        return known if self.results_file.is_file() else "nothing was measured"
