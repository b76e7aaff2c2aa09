"""What the page says of a generation: of the file of `chipsparse generate --report`."""

from __future__ import annotations

from collections import Counter

from chipsparse.cache.kinds import PARTS
from chipsparse.cli.pages.budget_map import Cell, budget_map
from chipsparse.cli.pages.elements import element, listed
from chipsparse.cli.pages.generation_changes import change_section
from chipsparse.cli.pages.generation_memory import memory_section
from chipsparse.cli.pages.generation_record import (
    ACTIONS,
    NO_LAYERS,
    PART_TITLES,
    GenerationRecord,
    read_generation,
)
from chipsparse.cli.pages.generation_steps import steps_section
from chipsparse.cli.pages.json_values import Values
from chipsparse.cli.pages.names import command_text, file_name, name_of
from chipsparse.cli.pages.part import (
    Missing,
    Part,
    QualityPoint,
    Section,
    Tile,
    command_section,
    folded,
    table,
)
from chipsparse.cli.pages.units import (
    decibels,
    picture_text,
    shortened,
    times,
)
from chipsparse.cli.wording import seconds_text
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.report.nothing_sparse import NOTHING

LONGEST_LABEL = 40  # of a prompt among others


def generation_part(values: Values) -> Part:
    """The part of the page; raises `UserError` where the file is damaged."""
    record = read_generation(values)
    sections: list[Section] = []
    missing: list[Missing] = []
    for found in (
        steps_section(record),
        _budget_section(record),
        change_section(record),
        memory_section(record),
        _running_section(record),
    ):
        if isinstance(found, Section):
            sections.append(found)
        else:
            missing.append(found)
    command = record.request.texts("command")
    if command:
        sections.append(command_section(command_text(command)))
    if record.comparison is None:
        missing.insert(
            0,
            Missing("Quality and speed", "They are there with generate --compare --report."),
        )
    return Part(
        kind="generation",
        source=values.file.name,
        title=record.request.text_or_none("prompt") or "A generation",
        facts=_facts(record),
        tiles=_tiles(record),
        sections=sections,
        missing=missing,
        alert=_alert(record),
        warnings=_warnings(record),
        points=_points(record),
    )


def _points(record: GenerationRecord) -> list[QualityPoint]:
    found = record.comparison
    if found is None or found.psnr_db is None:
        return []
    named = [
        record.values.file.stem,
        shortened(record.request.text_or_none("prompt") or "", LONGEST_LABEL),
        *([f"seed {record.request.count('seed')}"] if "seed" in record.request else []),
    ]
    label = ", ".join(text for text in named if text)
    return [QualityPoint(label, found.speedup, found.psnr_db)]


def _alert(record: GenerationRecord) -> str | None:
    """What ended it early."""
    error = record.values.text_or_none("error")
    done = sum(step.finished for step in record.steps)
    if error is not None:
        where = f"after {done} of {record.steps_asked} steps" if record.steps else "at its start"
        return f"This generation failed {where}: {error}"
    if done < record.steps_asked:
        return f"This generation was not finished: {done} of {record.steps_asked} steps were."
    return None


def _warnings(record: GenerationRecord) -> list[str]:
    """What the command warned of; a report from Python has the gravest of it."""
    warnings = record.request.texts("warnings")
    nothing = record.values.text_or_none("nothing_sparse")
    if nothing is not None and not any(each.startswith(NOTHING) for each in warnings):
        return [nothing, *warnings]
    return warnings


def _facts(record: GenerationRecord) -> list[tuple[str, str]]:
    values, request = record.values, record.request
    pipeline, settings = values.object("pipeline"), request.object("settings")
    versions = values.object("versions").content
    device = values.object("device")
    plans = [each for _, each in values.object("transformers").members()]
    # Nothing that ran dense tells in which type it did.
    dtype = values.text_or_none("dtype") or request.text_or_none("dtype")
    where = [device.text_or_none("name"), device.text_or_none("type"), dtype]
    return [
        ("model", name_of(pipeline.text_or_none("location") or "")),
        ("pipeline", pipeline.text_or_none("class") or ""),
        ("profile", name_of(request.text_or_none("profile") or "")),
        ("quality", request.text_or_none("quality") or ""),
        ("not shown", request.text_or_none("negative_prompt") or ""),
        ("picture", picture_text(settings.content)),
        ("starts from", _start(request)),
        ("guidance", _guidance(settings)),
        ("scheduler", request.text_or_none("scheduler") or ""),
        ("LoRA", ", ".join(_lora(each) for each in request.objects("loras"))),
        ("seed", str(request.content.get("seed", ""))),
        ("schedule", "; ".join(dict.fromkeys(plan.text("schedule") for plan in plans))),
        ("device", ", ".join(text for text in where if text)),
        (
            "versions",
            ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        ),
    ]


def _start(request: Values) -> str:
    """The picture that a generation starts from, and how much of it may change."""
    image, strength = request.text_or_none("image"), request.number_or_none("strength")
    if image is None:
        return ""
    return file_name(image) + ("" if strength is None else f", strength {strength:g}")


def _lora(lora: Values) -> str:
    return f"{file_name(lora.text('file'))} at {lora.number('scale'):g}"


def _guidance(settings: Values) -> str:
    """The scales of the guidance, as far as they are known."""
    scale, true_scale = (
        settings.number_or_none(name) for name in ("guidance_scale", "true_cfg_scale")
    )
    texts = [] if scale is None else [f"scale {scale:g}"]
    texts += [] if true_scale is None else [f"classifier-free {true_scale:g}"]
    return ", ".join(texts)


def _tiles(record: GenerationRecord) -> list[Tile]:
    tiles = []
    found, seconds = record.comparison, record.denoising_seconds
    if found is not None:
        dense = f"dense {seconds_text(seconds['dense'])}" if "dense" in seconds else None
        tiles.append(Tile(times(found.speedup), "as fast as dense", dense))
        ssim = None if found.ssim is None else f"SSIM {found.ssim:.4f}"
        tiles.append(Tile(decibels(found.psnr_db), "PSNR against dense", ssim))
    total = seconds.get("sparse", sum(step.seconds for step in record.steps))
    counts = Counter(step.action for step in record.steps)
    actions = ", ".join(f"{counts[name]} {name}" for name in ACTIONS if counts[name])
    if total:
        tiles.append(Tile(seconds_text(total), "denoising"))
    done = sum(step.finished for step in record.steps)
    count = str(done) if done == record.steps_asked else f"{done} of {record.steps_asked}"
    tiles.append(Tile(count, "step" if record.steps_asked == 1 else "steps", actions or None))
    totals = record.values.object("totals")
    cache = totals.number_or_none("cache_bytes")
    if cache:
        host = totals.number_or_none("host_bytes") or 0
        place = f"{format_bytes(round(host))} of them in host memory" if host else None
        tiles.append(Tile(format_bytes(round(cache)), "caches at most", place))
    return tiles


# Budgets.


def _budget_section(record: GenerationRecord) -> Section | Missing:
    title = "Budget of each layer and step"
    if not record.layers:
        return Missing(title, NO_LAYERS)
    body = [
        budget_map(
            _cells(record, part),
            layers=record.layers,
            steps=record.steps_total,
            caption=f"Computed {PART_TITLES[part]}",
        )
        for part in PARTS
        if any(step.cells(part) for step in record.steps)
    ]
    return Section(
        title,
        "A row for each layer, a column for each step. Rest the pointer on a cell to read it.",
        body,
    )


def _cells(record: GenerationRecord, part: str) -> dict[tuple[int, int], Cell]:
    cells = {}
    for step in record.steps:
        found = step.cells(part)
        if step.action == "skip":
            found = dict.fromkeys(range(record.layers), ("skip", 0.0))
        for layer, (action, kept) in found.items():
            cells[layer, step.number] = Cell(action, kept)
    return cells


# What ran.


def _running_section(record: GenerationRecord) -> Section | Missing:
    values = record.values
    body = []
    for name, heading in (
        ("fallbacks", "Ran dense, or denser than asked"),
        ("notes", "Worth knowing"),
    ):
        sentences = values.texts(name)
        if sentences:
            body += [element("h3", heading), listed(sentences)]
    backends = values.object("backends").texts_by_name()
    passed = values.object("passed_over")
    if backends:
        rows = []
        for op, backend in backends.items():
            reasons = passed.object(op).texts_by_name()
            rows.append((op, backend, "; ".join(f"{n}: {why}" for n, why in reasons.items())))
        body.append(
            folded("Backends", table(("operation", "ran on", "passed over"), rows, texts=3))
        )
    if not body:
        return Missing("What ran where", "No operation of chipsparse ran.")
    dense = values.texts("fallbacks")
    text = "" if dense else "Nothing ran dense, or denser than the profile asks."
    return Section("What ran where", text, body)
