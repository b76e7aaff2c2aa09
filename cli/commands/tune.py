"""`chipsparse tune`: a profile that meets a target of quality or time."""

from __future__ import annotations

from chipsparse.cli.tune.options import TuneOptions

EXAMPLE = "Example: [bold]chipsparse tune --min-psnr 30 -o profile.yaml[/bold]"


def tune(options: TuneOptions) -> None:
    """Find a schedule that meets a target of quality or speed, and write it as a profile.

    Scores on a few dense generations which steps can be left out, generates with the schedules
    that look best, each as fast as the others on this device, and verifies the winner on other
    prompts.
    """
    # Imported here so that --help does not wait for torch and diffusers.
    from chipsparse.cli.tune.job import run

    run(options)
