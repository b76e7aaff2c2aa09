"""What the page says of a results file of `chipsparse tune`."""

from __future__ import annotations

from chipsparse.cache_kinds import PARTS
from chipsparse.cli.pages.budget_map import Cell, budget_map
from chipsparse.cli.pages.elements import Child, element
from chipsparse.cli.pages.generation_record import PART_TITLES
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
from chipsparse.cli.summary import seconds_text

AGAIN = "Run the same tune command again: what is in the file is not measured anew."


def tuning_part(values: Values) -> Part:
    """The part of the page; raises `UserError` where the file is damaged."""
    record = read_tuning(values)
    sections: list[Section] = []
    missing: list[Missing] = []
    if record.verified or record.searches:
        sections.append(_quality_section(record))
    else:
        missing.append(Missing("Quality and speed", f"Nothing was verified yet. {AGAIN}"))
    chosen = [search for search in record.searches if search.chosen is not None]
    for search in chosen:
        assert search.chosen is not None
        sections.append(_budget_section(search, search.chosen))
    if not chosen:
        missing.append(Missing("Budget of each layer and step", _why_nothing_was_chosen(record)))
    if record.verified:
        sections.append(_held_out_section(record))
    else:
        missing.append(Missing("Held-out prompts", f"No config was verified yet. {AGAIN}"))
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
            for each in record.verified
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
    by_name = {each.name: each for each in record.verified}
    newest = record.searches[-1] if record.searches else None
    if newest is not None and newest.chosen is not None and newest.chosen.name in by_name:
        best = by_name[newest.chosen.name]
        if best.speedup is not None:
            dense = seconds_text(best.dense_seconds or 0.0)
            text = f"{seconds_text(best.seconds)}, dense {dense}"
            tiles.append(Tile(times(best.speedup), "as fast as dense", text))
        worst = min(best.psnrs, default=None)
        label = f"PSNR, worst of {len(best.pairs)} held-out prompts"
        tiles.append(Tile(decibels(worst), label, f"target: {newest.target}"))
    tiles.append(Tile(str(len(record.verified)), "configs verified", None))
    if newest is not None:
        tiles.append(Tile(str(len(newest.predicted)), "configs on the predicted frontier", None))
    tiles.append(Tile(str(record.measurements), "measurements in the file", None))
    return tiles


# Quality and speed.


def _quality_section(record: TuningRecord) -> Section:
    return Section(
        "Quality and speed",
        "The line is what the calibration predicts that no other config beats. A dot is a config "
        "that was verified on held-out prompts, at the lowest PSNR that it reached; the upright "
        "line above it reaches to its highest. A config is given up at the first prompt that "
        "misses the target, so that a single dot may stand for one prompt.",
        [quality_figure(record)],
    )


# Budgets.


def _budget_section(search: Search, chosen: Chosen) -> Section:
    steps = len(chosen.actions)
    kept = [part for part in PARTS if any(each is not None for each in chosen.shares[part])]
    body = [
        budget_map(
            {
                (layer, step): _cell(action, share)
                for layer, share in enumerate(chosen.shares[part])
                for step, action in enumerate(chosen.actions)
            },
            layers=len(chosen.shares[part]),
            steps=steps,
            caption=f"Chosen budget of {PART_TITLES[part]}" if kept else "What each step does",
        )
        for part in kept or PARTS[:1]
    ]
    counts = {name: chosen.actions.count(name) for name in dict.fromkeys(chosen.actions)}
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    never = [PART_TITLES[part] for part in PARTS if part not in kept]
    dense = f" No layer has sparse {' or '.join(never)}." if never else ""
    return Section(
        f"Budget of each layer and step, for {search.target}",
        f"Config {chosen.name}: {text} steps.{dense} What a layer keeps at sparse steps; a row for "
        "each layer, a column for each step.",
        body,
    )


def _cell(action: str, share: float | None) -> Cell:
    if action == "skip":
        return Cell("skip", 0.0)
    if share is None:
        return Cell("dense", 1.0)
    return Cell(action, share if action == "sparse" else 1.0)


# Held-out prompts.


def _held_out_section(record: TuningRecord) -> Section:
    chosen = {s.chosen.name for s in record.searches if s.chosen is not None}
    ordered = sorted(record.verified, key=lambda each: (each.name not in chosen, each.seconds))
    lpips = any(pair.lpips is not None for each in ordered for pair in each.pairs)
    headings = ["config", "prompt", "PSNR", "SSIM", *(["LPIPS"] if lpips else []), "time", "dense"]
    rows = []
    for each in ordered:
        for pair in each.pairs:
            mark = " (chosen)" if each.name in chosen else ""
            row: list[Child] = [
                element("code", each.name),
                f"{pair.prompt}{mark}",
                decibels(pair.psnr_db),
                "" if pair.ssim is None else f"{pair.ssim:.4f}",
            ]
            if lpips:
                row.append("" if pair.lpips is None else f"{pair.lpips:.4f}")
            dense = "" if pair.dense_seconds is None else seconds_text(pair.dense_seconds)
            rows.append([*row, seconds_text(pair.seconds), dense])
    return Section(
        "Held-out prompts",
        "Every verification: none of these prompts was used to calibrate. Sparse and dense have "
        "the same seed.",
        [table(headings, rows, texts=2)],
    )
