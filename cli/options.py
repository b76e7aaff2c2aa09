"""Options as fields of a dataclass: each is declared once, with its help, default and check.

A command takes one such record, and `as_command` makes of it the function that typer reads. A
field that `option` and `argument` did not make is none: so a command leaves out what it inherits.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
import typer.core

from chipsparse.cli.errors import UserError, reported_errors, say

REQUIRED: Any = dataclasses.MISSING

# Raises `UserError` for a wrong value of the option of this name; is not asked about None.
Check = Callable[[str, Any], None]
Read = Callable[[Any], Any]


@dataclass(frozen=True)
class _Declared:
    """What a field says besides its name, type and default; see `option`."""

    make: Callable[..., Any]
    names: tuple[str, ...]
    words: Mapping[str, Any]
    before: str | None = None
    check: Check | None = None
    read: Read | None = None

    def value_of(self, typed: Any) -> Any:
        return typed if self.read is None or typed is None else self.read(typed)


def option(
    *also: str,
    help: str,
    panel: str | None = None,
    default: Any = None,
    shown: str | bool = True,
    metavar: str | None = None,
    before: str | None = None,
    check: Check | None = None,
    read: Read | None = None,
) -> Any:
    """A field that is an option, called as the field is with dashes for underscores.

    Args:
        also: further names, such as ``-o``.
        panel: of the help under which it stands.
        default: what the field is where the option is left out.
        shown: as the default, in words; True shows the value, False nothing.
        metavar: stands for its value in the help.
        before: the option in front of which the help has it. Without it, a command's own options
            lead, as they are declared, and those that it inherits follow.
        check: of its value.
        read: makes the field's value of what was typed; raises `UserError`.
    """
    words = {"help": help, "rich_help_panel": panel, "show_default": shown, "metavar": metavar}
    declared = _Declared(typer.Option, also, words, before, check, read)
    return dataclasses.field(default=default, metadata={"declared": declared})


def argument(
    *, help: str, default: Any = None, metavar: str | None = None, read: Read | None = None
) -> Any:
    """A field that is an argument; see `option`."""
    words = {"help": help, "show_default": False, "metavar": metavar}
    declared = _Declared(typer.Argument, (), words, read=read)
    return dataclasses.field(default=default, metadata={"declared": declared})


# Those of the parts of the help that several commands have.
model_option = functools.partial(option, panel="Model")
output_option = functools.partial(option, panel="Output")


@dataclass(frozen=True, kw_only=True)
class PrintOptions:
    """What every command has; a subclass adds its own options."""

    json: bool = output_option(help="Print one JSON object instead.", default=False)
    debug: bool = output_option(
        help="Show the traceback of an error, and the libraries' own messages.", default=False
    )

    def check(self) -> None:
        """Raises `UserError` for what is wrong with any model and on any device."""
        for name, declared in _declared(type(self)).items():
            value = getattr(self, name)
            if declared.check is not None and value is not None:
                declared.check(option_name(name), value)

    def given(self) -> list[str]:
        """Names of the options and arguments that are not as if they were left out."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [
            declared.words["metavar"] if declared.make is typer.Argument else option_name(name)
            for name, declared in _declared(type(self)).items()
            if getattr(self, name) != defaults[name]
        ]

    def refuse(self, *names: str, why: str) -> None:
        """Raises `UserError` where an option is given that would be without effect."""
        for name in self.given():
            if name in names:
                raise UserError(f"{name} {why}")

    def kept(self) -> str:
        """What an interruption leaves."""
        return "nothing was written"


class LastCounts(typer.core.TyperCommand):
    """A command that says where an option stands twice which takes one value: the last counts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As usual, and says it."""
        if not ctx.resilient_parsing:  # else a shell completes the line
            _, _, order = self.make_parser(ctx).parse_args(args=[*args])
            for found, count in Counter(order).items():
                option = found if isinstance(found, typer.core.TyperOption) else None
                if count > 1 and option and not (option.multiple or option.is_flag):
                    say(f"warning: {option.opts[0]} is given {count} times; the last one counts")
        return super().parse_args(ctx, args)


AnyOptions = TypeVar("AnyOptions", bound=PrintOptions)


def as_command(run: Callable[[AnyOptions], None]) -> Callable[..., None]:
    """The function that typer makes a command of: what is typed is checked, then `run` gets it.

    Args:
        run: takes ``options``, whose annotation says which.
    """
    kind = get_type_hints(run)["options"]
    declared = _declared(kind)

    @functools.wraps(run)
    def command(**typed: Any) -> None:
        debug = bool(typed.get("debug"))
        with reported_errors(debug=debug):
            options = kind(**{name: declared[name].value_of(typed[name]) for name in typed})
            options.check()
        with reported_errors(debug=debug, kept=options.kept):
            run(options)

    command.__signature__ = inspect.Signature(_parameters(kind))  # type: ignore[attr-defined]
    return command


def option_name(field: str) -> str:
    """``--guidance-scale`` of ``guidance_scale``."""
    return f"--{field.replace('_', '-')}"


def reader(kind: type[PrintOptions], field: str) -> Read | None:
    """What makes a field's value of the text that was typed; None where its type tells."""
    return _declared(kind)[field].read


def panel_options(kind: type[PrintOptions], panel: str) -> list[str]:
    """The fields whose options stand under one heading of the help."""
    declared = _declared(kind).items()
    return [name for name, each in declared if each.words.get("rich_help_panel") == panel]


def argument_names(kind: type[PrintOptions]) -> list[str]:
    """The fields that are arguments, in their order."""
    return [name for name, each in _declared(kind).items() if each.make is typer.Argument]


def _declared(kind: type[PrintOptions]) -> dict[str, _Declared]:
    """The options and arguments by their fields, in the order of the help."""
    fields = {field.name: field.metadata for field in dataclasses.fields(kind)}
    # Those of the class first, then those of the class that it extends.
    kinds = enumerate(kind.__mro__)
    first_in = {name: i for i, each in kinds for name in inspect.get_annotations(each)}
    found = {
        name: fields[name]["declared"]
        for name in sorted(fields, key=first_in.__getitem__)
        if "declared" in fields[name]
    }
    order = list(found)
    for name, declared in found.items():
        if declared.before is not None:
            order.remove(name)
            order.insert(order.index(declared.before), name)
    return {name: found[name] for name in order}


def _parameters(kind: type[PrintOptions]) -> list[inspect.Parameter]:
    types = get_type_hints(kind)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    parameters = []
    for name, each in _declared(kind).items():
        names = (option_name(name), *each.names) if each.make is typer.Option else ()
        typed = types[name] if each.read is None else str if defaults[name] else str | None
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=Annotated[typed, each.make(*names, **each.words)],
                default=inspect.Parameter.empty if defaults[name] is REQUIRED else defaults[name],
            )
        )
    return parameters
