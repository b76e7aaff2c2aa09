"""`chipsparse compare`: two files, or two configs, against each other; or a whole suite."""

from __future__ import annotations

from chipsparse.cli.compare.options import CompareOptions

EXAMPLE = "Example: [bold]chipsparse compare dense profile --count 16 -o worst.mp4[/bold]"


def compare(options: CompareOptions) -> None:
    """Compare two files, two configs, or a suite: PSNR, SSIM, LPIPS, flicker, and speed.

    Files (one size and length) are compared frame by frame; lossy ones limit that (all but .png).

    Configs generate the prompts with the same seeds as dense does; each is compared with dense.

    A suite tells in one command whether it holds for your model, and writes a page.
    """
    # Imported where they are needed, so that --help does not wait for torch and diffusers.
    if options.suite is None and not options.configs:
        from chipsparse.cli.compare.files import compare_files

        return compare_files(options)
    from chipsparse.cli.compare.job import compare_configs, run_suite

    return compare_configs(options) if options.suite is None else run_suite(options)
