"""Measurements, from the committed records; no number here is typed by hand."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from benchmarks.curves import INTERVAL, LEAD, at_share, decibels, generation_of, quality_rows
from benchmarks.models import MODELS, STEPS
from benchmarks.moving_photographs.evaluate import (
    COMPARED,
    MODEL_CLASS,
    QUALITIES,
    costs,
    hardness,
    known_prices,
    made_in_all_ways,
    of_qualities,
    rows_of,
)
from benchmarks.prices import (
    FULL_SIZE,
    PRICED_AS,
    RESULTS,
    computed_prices,
    full_size_records,
    measured_prices,
    priced,
    speed_of,
)
from benchmarks.records import Record
from benchmarks.records import read as read_records
from chipsparse.config import Action, SparsityConfig
from chipsparse.experiments.engine import config_digest
from chipsparse.profiles.measured import measured_of
from chipsparse.profiles.profile import find_profile, profile_classes
from chipsparse.profiles.published import published_ranges
from chipsparse.sparse.plan import SparsityPlan
from docs.tables.markdown import table

CASES = {
    "hunyuan_720p": "HunyuanVideo 720p",
    "hunyuan_32k": "32k tokens",
    "wan14b_720p": "Wan 14B 720p",
    "wan1b_480p": "Wan 1.3B 480p",
    "wan14b_480p": "Wan 14B 480p",
    "flux_1280x768": "FLUX.1-dev 1280x768",
    "flux_1024": "FLUX.1-dev 1024x1024",
    "flux_2048": "FLUX.1-dev 2048x2048",
    "flux_4096": "FLUX.1-dev 4096x4096",
    "flux_image": "FLUX.1-dev, image tokens",
    "d64_video": "head size 64",
    "h3_5s": "MiniMax-H3, 5 s",
    "h3_10s": "MiniMax-H3, 10 s",
    "h3_15s": "MiniMax-H3, 15 s",
    "z_image": "Z-Image 1024x1024",
    "z_image_2048": "Z-Image 2048x2048",
    "z_image_4096": "Z-Image 4096x4096",
    "qwen_image21": "Qwen-Image 2.1 1024x1024",
    "qwen_image21_2048": "Qwen-Image 2.1 2048x2048",
    "qwen_image21_4096": "Qwen-Image 2.1 4096x4096",
    "flux3": "FLUX.3 1024x1024",
    "hidream": "HiDream-I1 1024x1024",
    "ltx2": "LTX-2 512x768x121",
    "kandinsky5": "Kandinsky 5 512x768x121",
    "kandinsky6": "Kandinsky 6 512x768x121",
    "helios": "Helios 384x640x33",
    "wan_vace": "Wan VACE 480x832x81",
    "cosmos3": "Cosmos 3 720x1280x189",
    "wan_animate": "Wan Animate 720x1280x77",
    "framepack": "FramePack, 42,465 tokens",
}
STEP_COLUMNS = ("dense", "refresh", "sparse")
STOCK = "stock, ms"
PHOTOGRAPHS = "moving_photographs_h200.json"
FEW_STEPS = "moving_photographs_few_steps_h200.json"
RULES = "moving_photographs_rules_h200.json"
USUAL = "NVIDIA H200, torch 2.11.0+cu130, diffusers 0.42.1"


def photographs() -> str:
    """Return the quality of every method at equal cost on moving photographs, and our lead."""
    clips = priced_photographs(PHOTOGRAPHS)
    prompts = len({clip["prompt"] for clip in clips})
    made = f"{generation_of(clips[0])}; {prompts} clips; {source(clips, PHOTOGRAPHS)}"
    rows = quality_rows(of_qualities(clips), speed_columns(clips))
    return f"{table(rows, texts=1)}\n\n{made}\n\n{hardness(clips)}"


def photographs_in_short() -> str:
    """Return the README's table of quality: the means of the same, and where both come from."""
    clips = priced_photographs(PHOTOGRAPHS)
    columns = speed_columns(clips)
    means = [
        {"PSNR, dB": row["method"], **{title: row[title].partition(" ")[0] for title in columns}}
        for row in quality_rows(of_qualities(clips), columns)
        if row["method"] not in (LEAD, INTERVAL)
    ]
    model = CASES[PRICED_AS]
    speed = f"Speed: of {model}'s steps on one H200 with random weights"
    known = known_prices()
    own = [clip for clip in of_qualities(clips) if clip["variant"] == QUALITIES]
    if not all(known[clip["step_config"]].measured for clip in own):
        speed = (
            f"Speed: computed by the cost model for {model} on one H200; those steps were not run"
        )
    return (
        f"{table(means, texts=1)}\n\nQuality: of a model of 53 M parameters that we trained. "
        f"{speed}. No full-size weights were run."
    )


def few_steps() -> str:
    """Return the qualities in few steps beside full and skipped steps of the same cost."""
    clips = priced_photographs(FEW_STEPS)
    rows = []
    for steps in sorted(unique(clips, "steps")):
        for row in reversed(rows_of(find(clips, steps=steps))):
            if row["variant"] == QUALITIES and row["setting"] in COMPARED:
                ahead = "-" if row.get("ahead") is None else f"{row['ahead']:+.1f}"
                worst = "-" if row.get("ahead") is None else f"{row['worst ahead']:+.1f}"
                rows.append(
                    {
                        "steps": f"{steps}",
                        "quality": f"`{row['setting']}`",
                        "in full": f"{row['D'] + row['R']:.0f}",
                        "sparse": f"{row['S']:.0f}",
                        "speed-up": f"{row['speedup']:.2f}x",
                        "PSNR (worst), dB": f"{row['psnr']:.1f} ({row['worst']:.1f})",
                        "ahead of skips": ahead,
                        "worst clip": worst,
                    },
                )
    return f"{table(rows, texts=2)}\n\n{source(clips, FEW_STEPS)}"


def sparse_mlp_rules() -> str:
    """Return what sparse MLPs lose at the steps of `fast`, and what dense ones have at their time.

    A dense MLP's quality at a shorter time lies between those of `draft` and `fast`.
    """
    qualities = find(priced(read(PHOTOGRAPHS), known_prices()), variant=QUALITIES)
    curves = {
        seed: [
            (clip["cost"], decibels(clip))
            for clip in find(qualities, seed=seed)
            if clip["setting"] in ("draft", "fast")
        ]
        for seed in unique(qualities, "seed")
    }
    clips = find(priced(read(RULES), known_prices()), setting="fast", refused=None)
    dense = find(qualities, setting="fast")
    rows = [_rule_row("dense", dense, curves)]
    for variant in unique(clips, "variant"):
        name = variant.removeprefix("MLP").removeprefix(",").strip()
        if name.endswith("%"):
            name = f"{name.removesuffix('%')} % of the neurons, by our kernels"
        rows.append(_rule_row(name, find(clips, variant=variant), curves))
    return f"{table(rows, texts=1)}\n\n{source(clips, RULES)}"


def _rule_row(
    name: str,
    clips: Sequence[Record],
    curves: Mapping[int, list[tuple[float, float]]],
) -> dict[str, str]:
    psnrs = [decibels(clip) for clip in clips]
    levels = [at_share(curves[clip["seed"]], clip["cost"]) or 0.0 for clip in clips]
    time = clips[0].get("mlp_time")
    ahead = statistics.fmean(psnrs) - statistics.fmean(levels)
    return {
        "MLPs of sparse steps": name,
        "time of an MLP": "-" if time is None else f"{time:.2f}",
        "speed-up": f"{1 / statistics.fmean(clip['cost'] for clip in clips):.2f}x",
        "PSNR (worst), dB": f"{statistics.fmean(psnrs):.1f} ({min(psnrs):.1f})",
        "against dense MLPs at that speed": f"{ahead:+.1f}",
        "clips": f"{len(clips)}",
    }


def priced_photographs(file: str) -> list[Record]:
    """Return the clips of a file of moving photographs, each with its cost."""
    clips = priced(read(file), known_prices())
    by_steps = (find(clips, steps=steps) for steps in unique(clips, "steps"))
    return [clip for of_it in by_steps for clip in made_in_all_ways(of_it)]


def speed_columns(clips: Iterable[Record]) -> dict[str, float]:
    """Return the costs of the shipped qualities by name and speed-up, the slowest first.

    Quality is of the small model, speed of a large one; where that was measured, both must be of
    one config.
    """
    speeds = [record for record in full_size_records() if record.get("config") is not None]
    speeds = find(speeds, case=PRICED_AS)
    for clip in clips:
        if speeds and clip["variant"] == QUALITIES and clip["setting"] in COMPARED:
            speed_of(clip, speeds)
    return costs(clips)


def published_quality() -> str:
    """Return the PSNR that step caches were published with, by model and speed-up."""
    rows = []
    for model, ranges in published_ranges().items():
        name = f"`{model}`" if model.endswith("Model") else model
        rows.append({"model": name, "PSNR": ", ".join(map(str, ranges))})
    return table(rows)


def full_size() -> str:
    """Return the times of steps and the speed-ups of every quality, of full-size transformers.

    A speed-up is counted from measured steps of the quality's config. Where one of its steps was
    not run, it is computed by the cost model and stands in brackets. Times of sparse steps are over
    the stock step of their own process.
    """
    records = full_size_records()
    rows = []
    for case in unique(records, "case"):
        of_case = find(records, case=case)
        model = MODELS[case]
        prices = measured_prices(records, model.qualities()["balanced"], case).by_action
        sparse = prices.get(Action.SPARSE)
        thirty = [
            record["sparse_ms"] / record["baseline_step_ms"]
            for record in of_case
            if record["schedule"] == "published" and record["sparse_ms"] is not None
        ]
        row = {
            "model": CASES[case],
            STOCK: _ms(of_case[0]["baseline_step_ms"]),
            "sparse, over stock": "not run" if sparse is None else f"{sparse:.3f}",
            "MLPs at 30 %, over stock": f"{thirty[0]:.3f}" if thirty else "not run",
        }
        for name in COMPARED:
            row[f"`{name}`"] = speedup_text(case, model.qualities()[name], records)
        rows.append(row)
    return f"{table(rows, texts=1)}\n\n{source(records, *FULL_SIZE)}"


def speedup_text(case: str, config: SparsityConfig, records: Sequence[Record]) -> str:
    """Return the speed-up of a config's generation, in brackets where it is computed."""
    model = MODELS[case]
    actions = SparsityPlan(model.decided(config), model.layout(), STEPS).actions()
    calls = Counter(action.value for action in actions)
    measured = measured_prices(records, config, case)
    if all(Action(action) in measured.by_action for action in calls):
        return f"{1 / measured.cost(calls):.2f}x"
    return f"({1 / computed_prices(config, case).cost(calls):.1f}x)"


def measured_classes() -> str:
    """Return the file of what was measured of each class, with the configs of today.

    Quality counts where the small model is of the class and ran the qualities' shipped configs.
    """
    records = full_size_records()
    facts: dict[str, dict[str, Any]] = {}
    for case in unique(records, "case"):
        model = MODELS[case]
        own = model.qualities()
        run = [
            name for name in COMPARED if not speedup_text(case, own[name], records).startswith("(")
        ]
        if run:
            speed = facts.setdefault(model.transformer_class, {}).setdefault("speed", {})
            speed[CASES[case]] = run
    clips = find(read(PHOTOGRAPHS), variant=QUALITIES)
    small = {clip["setting"]: clip["config"] for clip in clips}
    large = MODELS[PRICED_AS]
    shipped = find_profile(None, MODEL_CLASS).qualities
    if all(small[name] == config_digest(large.decided(shipped[name])) for name in COMPARED):
        facts.setdefault(MODEL_CLASS, {})["quality"] = True
    text = yaml.safe_dump(facts, sort_keys=True, default_flow_style=None, width=100)
    return f"# Written by `python -m docs.tables` from benchmarks/results.\n{text}"


def what_was_measured() -> str:
    """Return a row for each class of which anything was measured, and the list of the others."""
    rows = []
    others = []
    for name in profile_classes():
        measured = measured_of(name)
        if not measured.speed and not measured.quality:
            others.append(f"`{name}`")
            continue
        rows.append(
            {
                "class of the transformer": f"`{name}`",
                "speed": measured.runs,
                "quality": measured.quality_text,
            },
        )
    return f"{table(rows)}\n\nNothing was measured of {', '.join(others)}."


def full_size_8_bits() -> str:
    """Return the same with full attention or linears in 8 bits, against both kinds in stock."""
    file = "full_size_fp8_h200.json"
    records = read(file)
    in_16_bits = {record["case"]: record for record in records if record["linears"] != "fp8"}
    rows = []
    for record in (record for record in records if record["schedule"] != "sparse"):
        stock = _ms(record["baseline_step_ms"])
        speedup = f"{record['speedup']:.2f}x"
        other = in_16_bits.get(record["case"]) if record["linears"] == "fp8" else None
        if other is not None:
            stock += f" ({_ms(other['baseline_step_ms'])})"
            speedup += f" ({other['baseline_ms'] / record['latency_ms']:.2f}x)"
        rows.append(
            {
                "model": CASES[record["case"]],
                "linears": record["linears"].replace("bfloat", "bf"),
                "schedule": record["schedule"],
                STOCK: stock,
                **{f"{name}, ms": _ms(record[f"{name}_ms"]) for name in STEP_COLUMNS},
                "all steps": speedup,
            },
        )
    return f"{table(rows, texts=3)}\n\n{source(records, file)}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def several_gpus() -> str:
    """Return steps and generations on several GPUs against one, times as of all blocks."""
    file = "parallel_h200.json"
    records = read(file)
    rows = []
    for record in records:
        scale = record["blocks"] / record["measured_blocks"]
        alone = record["alone"]
        for together in record["together"]:
            ms = together["ms"]
            split = {"branches": together["guidance"], "heads": together["ulysses"]}
            row = {
                "model": CASES[record["case"]],
                "split": ", ".join(f"{n}x {what}" for what, n in split.items() if n > 1),
            }
            for name in STEP_COLUMNS:
                before, after = (scale * value[name] / 1e3 for value in (alone["ms"], ms))
                row[f"{name}, s"] = f"{before:.2f} to {after:.2f}"
            row["50 steps"] = f"{together['generation_speedup']['sparse']:.2f}x"
            row["exchange"] = f"{together['exposed_share']['sparse']:.0%}"
            rows.append(row)
    return f"{table(rows, texts=2)}\n\n{source(records, file)}"


def _of_ideal(record: Record, digits: int) -> str:
    """Return a speed-up with its share of the ideal and the TFLOP/s that it was reached with."""
    speedup = record["speedup"]
    share = record["speedup"] / record["ideal"]
    return f"{speedup:.{digits}f}x ({share:.0%}, {record['tflops']:.0f})"


def _dense(record: Record) -> str:
    """Return the time of the dense layer with its TFLOP/s; its work is 1 over the kept share."""
    tflops = record["tflops"] * record["ideal"] / record["speedup"]
    return f"{record['baseline_ms']:.3g} ({tflops:.0f})"


def attention_kernels() -> str:
    """Return the speed-ups of column-sparse attention over dense, and the cost of a refresh."""
    file = "attention_kernels_h200.json"
    records = read(file)
    rows = []
    for case in unique(records, "case"):
        sparse = find(records, op="column_sparse_attention", case=case, delta_rule="none")
        sums = find(records, op="dense_attention_column_sums", case=case, backend="gluon")
        (refresh,) = find(sums, block_size=128)
        row = {
            "case": CASES[case],
            "tokens": f"{sparse[0]['tokens']:,}",
            "kept": f"{sparse[0]['density']:.1%}",
            "cuDNN, ms": _dense(sparse[0]),
        }
        for backend, block in (("gluon", 128), ("gluon", 192), ("triton", 128)):
            kernels = find(sparse, backend=backend, block_size=block)
            row[f"{backend.title()}, {block}"] = _of_ideal(kernels[0], 1) if kernels else "-"
        row["refresh / dense"] = f"{refresh['latency_ms'] / refresh['baseline_ms']:.2f}"
        rows.append(row)
    return f"{table(rows, texts=1)}\n\n{source(records, file)}"


def sparse_mlp() -> str:
    """Return the speed-ups of the sparse feed-forward layer, choice of neurons included."""
    file = "sparse_mlp_h200.json"
    records = find(read(file), op="sparse_mlp")
    rows = []
    for case in unique(records, "case"):
        by_backend = {record["backend"]: record for record in find(records, case=case)}
        gluon = by_backend["gluon"]
        rows.append(
            {
                "case": CASES[case],
                "tokens": f"{gluon['mlp_tokens']:,}",
                "width": f"{gluon['channels']:,} to {gluon['mlp_width']:,}",
                "kept": f"{gluon['density']:.0%}",
                "dense, ms": _dense(gluon),
                "Gluon": _of_ideal(gluon, 2),
                "Triton": _of_ideal(by_backend["triton"], 2),
            },
        )
    return f"{table(rows, texts=1)}\n\n{source(records, file)}"


def host_memory() -> str:
    """Return sparse steps with all caches in host memory, against all of them on the GPU."""
    file = "offload_h200.json"
    records = read(file)
    rows = [
        {
            "case": CASES[record["case"]],
            "layers": str(record["layers"]),
            "MLP": record["mlp"],
            "to the GPU": f"{record['to_device_bytes'] / 1e9:.1f} GB",
            "back": f"{record['to_host_bytes'] / 1e9:.1f} GB" if record["to_host_bytes"] else "-",
            "on the GPU, ms": f"{record['baseline_ms']:,.0f}",
            "in host memory, ms": f"{record['latency_ms']:,.0f}",
            "ratio": f"{record['latency_ms'] / record['baseline_ms']:.3f}",
        }
        for record in records
    ]
    return f"{table(rows, texts=1)}\n\n{source(records, file)}"


def tiny_wan_time() -> str:
    """Return time and quality of whole generations of tiny-wan on a CPU: median, least, most."""
    file = "end_to_end_cpu.json"
    records = [record for record in read(file) if not record["case"].startswith("median")]
    values = {
        "dense, s": ([record["baseline_ms"] / 1e3 for record in records], 1),
        "chipsparse, s": ([record["latency_ms"] / 1e3 for record in records], 1),
        "speed-up": ([record["speedup"] for record in records], 2),
        "PSNR, dB": ([record["psnr"] for record in records], 1),
        "SSIM": ([record["ssim"] for record in records], 3),
    }
    rows = [
        {name: function.__name__}
        | {key: f"{function(column):.{digits}f}" for key, (column, digits) in values.items()}
        for name, function in (("of 8 prompts", f) for f in (statistics.median, min, max))
    ]
    return f"{table(rows, texts=1)}\n\n{source(records, file)}"


def read(file: str) -> list[Record]:
    """Return the records of a file of results."""
    return read_records(RESULTS / file)


def find(records: Iterable[Record], **values: Any) -> list[Record]:
    """Return the records that have these values."""
    return [record for record in records if all(record.get(k) == v for k, v in values.items())]


def unique(records: Iterable[Record], name: str) -> Sequence[Any]:
    """Return the values of a field that are known, in the order in which they come first."""
    return list(dict.fromkeys(record[name] for record in records if record.get(name) is not None))


def source(records: Iterable[Record], *files: str) -> str:
    """Return the links of records, and device and versions where they are not the usual ones."""
    facts = {name: "/".join(unique(records, name)) for name in ("device", "torch", "diffusers")}
    links = ", ".join(f"[records](../benchmarks/results/{file})" for file in files)
    made = f"{facts['device']}, torch {facts['torch']}, diffusers {facts['diffusers']}"
    return links if made == USUAL else f"{made}; {links}"
