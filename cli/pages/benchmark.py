"""What the page says of a benchmark: of what `chipsparse bench --json` prints."""

from __future__ import annotations

import shlex

from chipsparse.cache.kinds import PARTS
from chipsparse.cli.errors import UserError, first_line
from chipsparse.cli.pages.elements import element, listed
from chipsparse.cli.pages.generation_record import ACTIONS
from chipsparse.cli.pages.json_values import Values
from chipsparse.cli.pages.names import command_text, name_of
from chipsparse.cli.pages.part import Missing, Part, Section, Tile, command_section, table
from chipsparse.cli.pages.units import percent, picture_text, times
from chipsparse.cli.wording import seconds_text
from chipsparse.common.byte_sizes import format_bytes


def benchmark_part(values: Values) -> Part:
    """The part of the page; raises `UserError` where the file is damaged."""
    sections: list[Section] = []
    missing: list[Missing] = []
    layers = values.objects("layers")
    if layers:
        sections.append(_layers_section(layers, values.texts("dense")))
    else:
        missing.append(Missing("One layer", "No layer of this model runs sparse here."))
    if "steps" in values:
        sections.append(_steps_section(values.object("steps")))
    else:
        missing.append(
            Missing("Denoising steps", "They are measured by bench without its --kernels.")
        )
    sections.append(command_section(command_text(_words(values))))
    return Part(
        kind="benchmark",
        source=values.file.name,
        title=f"Times on {values.text('device_name')}",
        facts=_facts(values),
        tiles=_tiles(values, layers),
        sections=sections,
        missing=missing,
    )


def _words(values: Values) -> list[str]:
    """Those of the command."""
    try:
        return shlex.split(values.text("command"))
    except ValueError as error:  # a quote that is not closed
        raise UserError(f"{values.file} is damaged: command: {first_line(error)}") from error


def _facts(values: Values) -> list[tuple[str, str]]:
    settings, versions = values.object("settings").content, values.object("versions").content
    tokens, heads, width = (values.count(name) for name in ("tokens", "heads", "head_dim"))
    names = [f"{name} {version}" for name, version in versions.items() if version]
    weights = ", random weights" if values.flag("random_weights") else ""
    return [
        ("model", f"{name_of(values.text('model'))} ({values.text('transformer_class')}){weights}"),
        ("profile", name_of(values.text("profile"))),
        ("picture", f"{picture_text(settings)}: {tokens:,} tokens, {heads} heads of {width}"),
        ("device", f"{values.text('device_name')}, {values.text('dtype')}"),
        ("versions", ", ".join(names)),
    ]


def _tiles(values: Values, layers: list[Values]) -> list[Tile]:
    tiles = []
    steps = values.object("steps")
    if "speedup_run" in steps:
        run, stock = (seconds_text(steps.number(name)) for name in ("patched_run", "stock_run"))
        detail = f"{run}, stock {stock}; summed from measured steps"
        tiles.append(Tile(times(steps.number("speedup_run")), "all steps, over stock", detail))
    for part in PARTS:
        best = [each.number("speedup") for each in layers if each.content.get("part") == part]
        if best:
            label = f"sparse {'MLP' if part == 'mlp' else part}, best layer"
            tiles.append(Tile(times(max(best)), label, "over PyTorch's own operation"))
    return tiles


def _layers_section(layers: list[Values], dense: list[str]) -> Section:
    rows = []
    for each in layers:
        spent = each.object("milliseconds")
        part = "MLP" if each.choice("part", PARTS) == "mlp" else "attention"
        rows.append(
            (
                f"{part}, {each.text('kind')}",
                percent(each.number("kept") / max(1, each.count("total"))),
                _milliseconds(each.number("baseline_ms")),
                *(_milliseconds(spent.number(action)) for action in ACTIONS[:3]),
                times(each.number("speedup")),
            )
        )
    headings = ("layer", "kept", "PyTorch", "dense", "refresh", "sparse", "speed-up")
    body = [table(headings, rows)]
    if dense:
        body += [element("h3", "Dense"), listed(dense)]
    return Section(
        "One layer",
        "Median time of one layer of each kind. The speed-up is that of the sparse step over "
        "PyTorch's own operation in the same process.",
        body,
    )


def _milliseconds(value: float) -> str:
    return seconds_text(value / 1e3)


def _steps_section(steps: Values) -> Section:
    stock, counts = steps.number("stock"), steps.object("counts").numbers_by_name()
    rows = [("stock", seconds_text(stock), times(1.0), "")]
    for action, seconds in steps.object("patched").numbers_by_name().items():
        ratio = "" if action == "skip" or not seconds else times(stock / seconds)
        rows.append((action, seconds_text(seconds), ratio, f"{counts.get(action, 0):g}"))
    body = [table(("step", "time", "speed-up", "in a generation"), rows)]
    peaks = [steps.number_or_none(f"{name}_peak_bytes") for name in ("patched", "stock")]
    notes = [f"fallback: {sentence}" for sentence in steps.texts("fallbacks")]
    if None not in peaks:
        own, other = (format_bytes(round(peak or 0)) for peak in peaks)
        notes.append(f"Peak memory on the GPU: {own}, stock {other}.")
    before, after = steps.number("stock_before"), steps.number("stock_after")
    if abs(after / before - 1) > 0.05:
        both = f"{seconds_text(before)} before the others and {seconds_text(after)} after them"
        notes.append(f"Stock steps took {both}: this machine's speed changes.")
    if notes:
        body.append(listed(notes))
    return Section("Denoising steps", "Median time of a step, all guidance branches.", body)
