"""What the page says of a results file of `chipsparse tune`."""

from __future__ import annotations

from chipsparse.cli.pages.budget_map import Cell, budget_map
from chipsparse.cli.pages.elements import Child
from chipsparse.cli.pages.json_values import Values
from chipsparse.cli.pages.part import Missing, Part, QualityPoint, Section, Tile, table
from chipsparse.cli.pages.tuning_chart import quality_figure
from chipsparse.cli.pages.tuning_record import (
    Chosen,
    Search,
    TuningRecord,
    read_tuning,
)
from chipsparse.cli.pages.units import decibels, picture_text, times
from chipsparse.cli.wording import seconds_text

AGAIN = "Run the same tune command again: what is in the file is not measured anew."


def tuning_part(values: Values) -> Part:
    """The part of the page; raises `UserError` where the file is damaged."""
    record = read_tuning(values)
    sections: list[Section] = []
    missing: list[Missing] = []
    if record.tried or record.searches:
        sections.append(_quality_section(record))
    else:
        missing.append(Missing("Quality and speed", f"Nothing was tried yet. {AGAIN}"))
    chosen = [search for search in record.searches if search.chosen is not None]
    for search in chosen:
        assert search.chosen is not None
        sections.append(_schedule_section(search, search.chosen))
    if not chosen:
        missing.append(Missing("Chosen schedule", _why_nothing_was_chosen(record)))
    if record.tried:
        sections.append(_candidates_section(record))
    else:
        missing.append(Missing("Candidates", f"Nothing was tried yet. {AGAIN}"))
    about = record.about.content
    return Part(
        kind="tuning",
        source=values.file.name,
        title=f"Tuning of {about.get('model', 'a model')}",
        facts=_facts(record),
        tiles=_tiles(record),
        sections=sections,
        missing=missing,
        points=[
            QualityPoint(f"{values.file.stem}, {each.name}", each.speedup, min(each.psnrs))
            for each in record.tried
            if each.speedup is not None and each.psnrs
        ],
    )


def _why_nothing_was_chosen(record: TuningRecord) -> str:
    if record.searches:
        targets = "; ".join(search.target for search in record.searches)
        return (
            f"No config was seen to reach the target ({targets}): the search was interrupted, or "
            f"ended without one. {AGAIN}"
        )
    return f"This file keeps no search, as those of older versions and of interrupted runs. {AGAIN}"


def _facts(record: TuningRecord) -> list[tuple[str, str]]:
    about = record.about.content
    versions = (f"{name} {about.get(name)}" for name in ("chipsparse", "torch", "diffusers"))
    where = (about.get("device"), about.get("dtype"))
    return [
        ("model", f"{about.get('model')} ({about.get('transformer_class')})"),
        ("picture", f"{picture_text(about)}, {about.get('num_inference_steps')} steps"),
        ("targets", "; ".join(dict.fromkeys(search.target for search in record.searches))),
        ("delta rule", str(about.get("attention.delta_rule", ""))),
        ("device", ", ".join(str(each) for each in where if each)),
        ("versions", ", ".join(versions)),
    ]


def _tiles(record: TuningRecord) -> list[Tile]:
    tiles = []
    by_name = {each.name: each for each in record.tried}
    newest = record.searches[-1] if record.searches else None
    if newest is not None and newest.chosen is not None and newest.chosen.name in by_name:
        best = by_name[newest.chosen.name].on(newest.held_out)
        if best.speedup is not None:
            dense = seconds_text(best.dense_seconds or 0.0)
            text = f"{seconds_text(best.seconds)}, dense {dense}"
            tiles.append(Tile(times(best.speedup), "as fast as dense", text))
        worst = min(best.psnrs, default=None)
        label = f"PSNR, worst of {len(best.pairs)} held-out prompts"
        tiles.append(Tile(decibels(worst), label, f"target: {newest.target}"))
    tiles.append(Tile(str(len(record.tried)), "configs tried", None))
    tiles.append(Tile(str(record.measurements), "measurements in the file", None))
    return tiles


# Quality and speed.


def _quality_section(record: TuningRecord) -> Section:
    return Section(
        "Quality and speed",
        "A dot is a config, at the lowest PSNR that it reached on any prompt; the upright line "
        "above it reaches to its highest. Configs are given up early where others of the same time "
        "are better, or where a held-out prompt misses the target.",
        [quality_figure(record)],
    )


# The schedule.


def _schedule_section(search: Search, chosen: Chosen) -> Section:
    steps = len(chosen.actions)
    cells = {
        (0, step): _cell(action, chosen.keep_fraction) for step, action in enumerate(chosen.actions)
    }
    return Section(
        f"Chosen schedule, for {search.target}",
        f"Config {chosen.name}: {chosen.form}.",
        [budget_map(cells, layers=1, steps=steps, caption="What each step does, all layers alike")],
    )


def _cell(action: str, keep_fraction: float) -> Cell:
    return Cell(action, {"skip": 0.0, "sparse": keep_fraction}.get(action, 1.0))


# Candidates.


def _candidates_section(record: TuningRecord) -> Section:
    chosen = {s.chosen.name for s in record.searches if s.chosen is not None}
    ordered = sorted(record.tried, key=lambda each: (each.name not in chosen, each.seconds))
    lpips = any(pair.lpips is not None for each in ordered for pair in each.pairs)
    headings = ["config", "prompt", "PSNR", "SSIM", *(["LPIPS"] if lpips else []), "time", "dense"]
    held_out = {prompt for search in record.searches for prompt in search.held_out}
    rows = []
    for each in ordered:
        for pair in each.pairs:
            mark = " (chosen)" if each.name in chosen else ""
            row: list[Child] = [
                f"{each.form}{mark}",
                f"{pair.prompt}{', held out' if pair.prompt in held_out else ''}",
                decibels(pair.psnr_db),
                "" if pair.ssim is None else f"{pair.ssim:.4f}",
            ]
            if lpips:
                row.append("" if pair.lpips is None else f"{pair.lpips:.4f}")
            dense = "" if pair.dense_seconds is None else seconds_text(pair.dense_seconds)
            rows.append([*row, seconds_text(pair.seconds), dense])
    return Section(
        "Candidates",
        "Every generation of the search, against the dense one with the same seed. Held-out "
        "prompts had no part in the choice of the form.",
        [table(headings, rows, texts=2)],
    )
