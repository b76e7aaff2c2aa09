"""The `chipsparse` command: its global options and subcommands.

What it consists of is imported when Ctrl-C is minded already.
"""

from __future__ import annotations

import sys

from chipsparse.common import stopping

TYPE_CHECKING = False  # `typing` takes longer to import than all else here
if TYPE_CHECKING:
    from typing import Any

    import typer

    app: typer.Typer

LEAST_BOXES = 72  # columns of a terminal
HELP = (
    "Faster diffusion transformers, without training.\n\n"
    "Diffusion models compute much the same at every denoising step. chipsparse computes a few "
    "steps in full, and between them only what changes."
)


def __getattr__(name: str) -> object:
    """Return ``app``, the command for Typer; it is made at its first use."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()["app"] = _make_app()
    return made


def _make_app() -> typer.Typer:
    import shutil

    import typer
    from typer.core import TyperCommand, TyperGroup, TyperOption

    from chipsparse.cli.commands import COMMANDS, generate
    from chipsparse.cli.errors import say
    from chipsparse.cli.options import as_command

    examples = {command: f"Example: chipsparse {words}" for command, words in COMMANDS.items()}

    def fit(command: Any, formatter: Any) -> None:  # noqa: ANN401 - Typer's own click
        """Leave the boxes and columns of the help out where those would cut the options' names."""
        columns = shutil.get_terminal_size().columns
        if columns < LEAST_BOXES:
            command.rich_markup_mode = None
            formatter.width = columns - 1

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - Typer's own click
            """Refuse two outputs, and tell of other options with two values: the last counts."""
            _, _, given = self.make_parser(ctx).parse_args(args=[*args])
            single = [p for p in given if isinstance(p, TyperOption) and not p.multiple]
            for option in dict.fromkeys(single):
                times = single.count(option)
                twice = f"{option.opts[0]} is given {times} times"
                if times > 1 and option.name == "output":
                    ctx.fail(f"{twice}; give it once")
                if times > 1 and not option.is_flag:
                    say(f"warning: {twice}; the last one counts")
            return super().parse_args(ctx, args)

        def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - Typer's own click
            fit(self, formatter)
            super().format_help(ctx, formatter)

    class Group(TyperGroup):
        def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - Typer's own click
            fit(self, formatter)
            super().format_help(ctx, formatter)

    app = typer.Typer(
        cls=Group,
        rich_markup_mode="rich",
        name="chipsparse",
        help=HELP,
        epilog=examples[generate],
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for command, example in examples.items():
        app.command(cls=Command, epilog=example)(as_command(command))

    def print_version(asked: bool) -> None:
        if asked:
            from chipsparse.common.version import __version__

            print(f"chipsparse {__version__}")
            raise typer.Exit()

    version = typer.Option(
        False,
        "--version",
        help="Show the version and exit.",
        callback=print_version,
        is_eager=True,
    )

    def global_options(show_version: bool = version) -> None:
        pass

    app.callback()(global_options)
    return app


def main() -> None:
    """Entry point of the `chipsparse` command."""
    ending = stopping.Ending()
    with stopping.listening():
        try:
            code = _run()
        except KeyboardInterrupt as interrupt:  # where no command has begun yet
            stopping.end(stopping.exit_code(interrupt) - 128)
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            code = 1 if isinstance(error.code, str) else int(error.code or 0)
        if stopping.asked_to_stop() is not None:
            # Python's own end may take as long as a command's beginning.
            stopping.leave(code or 0)
    ending.code = int(code or 0)
    if code:
        sys.exit(code)


def _run() -> int | None:
    """Run the command, and return its exit code; what it says goes to any terminal."""
    import codecs
    from io import TextIOWrapper

    from chipsparse.cli import main as this  # not as `__main__`
    from chipsparse.cli.errors import usage_errors

    for stream in (sys.stdout, sys.stderr):
        # Else a prompt or a file's name with a letter that the encoding lacks would be an error.
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            is_utf8 = codecs.lookup(stream.encoding).name == "utf-8"
            stream.reconfigure(errors="surrogateescape" if is_utf8 else "replace")
    with usage_errors():
        # As a module, too: a shell completes no `python -m chipsparse`.
        code: int | None = this.app(prog_name="chipsparse", standalone_mode=False)
        return code


if __name__ == "__main__":
    main()
