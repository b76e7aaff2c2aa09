"""What was measured, from the committed records; nothing here is typed by hand."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.equal_work.curves import TARGETS, Axis
from benchmarks.equal_work.tables import generation_of, quality_rows
from benchmarks.models import STEPS
from benchmarks.records import Record
from benchmarks.records import read as read_records
from chipsparse.plan import Action
from docs.tables.markdown import table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CASES = {
    "hunyuan_720p": "HunyuanVideo 720p",
    "hunyuan_32k": "32k tokens",
    "wan14b_720p": "Wan 14B 720p",
    "wan1b_480p": "Wan 1.3B 480p",
    "flux_1280x768": "FLUX.1-dev 1280x768",
    "flux_image": "FLUX.1-dev, image tokens",
    "d64_video": "head size 64",
    "h3_5s": "MiniMax-H3, 5 s (38,222 rows)",
    "h3_10s": "MiniMax-H3, 10 s (73,898 rows)",
    "h3_15s": "MiniMax-H3, 15 s (104,478 rows)",
    "z_image": "Z-Image 1024x1024",
    "qwen_image21": "Qwen-Image 2.1 1024x1024",
    "flux3": "FLUX.3 1024x1024",
    "hidream": "HiDream-I1 1024x1024",
    "ltx2": "LTX-2 512x768, 121 frames",
    "kandinsky5": "Kandinsky 5 512x768, 121 frames",
    "kandinsky6": "Kandinsky 6 512x768, 121 frames",
    "helios": "Helios 384x640, 33 frames",
    "wan_vace": "Wan VACE 480x832, 81 frames",
    "cosmos3": "Cosmos 3 720x1280, 189 frames",
    "wan_animate": "Wan Animate 720x1280, 77 frames",
    "framepack": "FramePack, 42,465 tokens",
}
RULES = ("merge", "difference")

CELLS = "In brackets behind a speed-up: its share of the ideal, and its TFLOP/s."


def of_ideal(record: Record, *, digits: int) -> str:
    """A speed-up with its share of the ideal and the TFLOP/s that it was reached with."""
    speedup, share = record["speedup"], record["speedup"] / record["ideal"]
    return f"{speedup:.{digits}f}x ({share:.0%}, {record['tflops']:.0f})"


def dense_tflops(record: Record) -> float:
    """TFLOP/s of the dense layer: it does 1 over the kept share as much, in its own time."""
    return record["tflops"] * record["ideal"] / record["speedup"]


def dense_of(record: Record) -> str:
    """Time and TFLOP/s of the dense layer of the same process."""
    return f"{record['baseline_ms']:.3g} ({dense_tflops(record):.0f})"


def attention_kernels() -> str:
    """Column-sparse attention and a refresh's attention, against the dense one."""
    file = "attention_kernels_h200.json"
    records = read(file)

    def speedup(case: str, backend: str, rows: int) -> str:
        """Without a delta rule: it was timed for one backend only."""
        values = {"case": case, "backend": backend, "block_size": rows, "delta_rule": "none"}
        found = find(records, op="column_sparse_attention", **values)
        return of_ideal(found[0], digits=1) if found else "-"

    rows = []
    for case in unique(records, "case"):
        sparse = find(records, op="column_sparse_attention", case=case)[0]
        refresh = find(
            records, op="dense_attention_column_sums", case=case, backend="gluon", block_size=128
        )[0]
        rows.append(
            {
                "case": name_of(case),
                "tokens": f"{sparse['tokens']:,}",
                "kept": f"{sparse['density']:.1%}",
                "cuDNN, ms (TFLOP/s)": dense_of(sparse),
                "ideal": f"{sparse['ideal']:.1f}x",
                "Gluon, 128 rows": speedup(case, "gluon", 128),
                "Gluon, 192": speedup(case, "gluon", 192),
                "Triton, 128": speedup(case, "triton", 128),
                "refresh over dense": f"{refresh['latency_ms'] / refresh['baseline_ms']:.2f}",
            }
        )
    return f"{numbers(rows)}\n\n{source(file, records)}. {CELLS}"


def attention_by_share() -> str:
    """The speed-up over dense attention, by the share of columns kept."""
    file = "attention_curve_h200.json"
    records = find(read(file), curve="keep")
    shares = sorted({round(record["density"], 2) for record in records})
    rows = []
    for case in unique(records, "case"):
        found = {round(each["density"], 2): each for each in find(records, case=case)}
        first = found[shares[0]]
        name = f"{first['tokens']:,} tokens, {first['heads']} heads"
        name = f"{name}, cuDNN at {dense_tflops(first):.0f}"
        rows.append((name, *(of_ideal(found[share], digits=1) for share in shares)))
    ideals = [f"{1 / share:.1f}x" for share in shares]
    rows.append(("ideal", *ideals))
    columns = ("columns kept", *(f"{share:.0%}" for share in shares))
    return f"{table(columns, rows, texts=1)}\n\n{source(file, records)}. {CELLS}"


def sparse_mlp() -> str:
    """The sparse feed-forward layer, choice of neurons included."""
    file = "sparse_mlp_h200.json"
    records = find(read(file), op="sparse_mlp")
    rows = []
    for case in unique(records, "case"):
        by_backend = {record["backend"]: record for record in find(records, case=case)}
        gluon, triton = by_backend["gluon"], by_backend["triton"]
        rows.append(
            {
                "case": name_of(case),
                "tokens": f"{gluon['mlp_tokens']:,}",
                "width": f"{gluon['channels']:,} to {gluon['mlp_width']:,}",
                "neurons kept": f"{gluon['density']:.0%}",
                "dense, ms (TFLOP/s)": dense_of(gluon),
                "ideal": f"{gluon['ideal']:.2f}x",
                "Gluon": of_ideal(gluon, digits=2),
                "Triton": of_ideal(triton, digits=2),
            }
        )
    return f"{numbers(rows)}\n\n{source(file, records)}. {CELLS}"


def full_size(file: str) -> str:
    """Generations of full-size transformers, summed from measured steps.

    Args:
        file: of records.
    """
    records = read(file)
    rows = [
        {
            "model": name_of(record["case"]),
            "schedule": record["schedule"],
            "steps": steps(record),
            "columns, neurons": shares(record),
            "stock, ms": f"{record['baseline_step_ms']:,.0f}",
            **of_actions(record),
            "all steps": f"{record['speedup']:.2f}x",
        }
        for record in records
    ]
    return f"{numbers(rows, texts=3)}\n\n{source(file, records)}."


def of_actions(record: Record) -> dict[str, str]:
    """What a step of each action took."""
    return {
        f"{action}, ms": "-" if (ms := record[f"{action}_ms"]) is None else f"{ms:,.0f}"
        for action in ("dense", "refresh", "sparse")
    }


def full_size_8_bits(file: str) -> str:
    """The same with full attention or linears in 8 bits, against both kinds of linears in stock.

    Args:
        file: of records; the baseline with 16-bit linears is that of another run of the same model.
    """
    records = read(file)
    in_16_bits = {record["case"]: record for record in records if record["linears"] != "fp8"}
    rows = []
    for record in records:
        stock, speedup = f"{record['baseline_step_ms']:,.0f}", f"{record['speedup']:.2f}x"
        other = in_16_bits.get(record["case"]) if record["linears"] == "fp8" else None
        if other is not None:
            stock += f" ({other['baseline_step_ms']:,.0f})"
            speedup += f" ({other['baseline_ms'] / record['latency_ms']:.2f}x)"
        kept = shares(record)
        attention = "fp8" if record["precision"] == "fp8" else record["dtype"]
        rows.append(
            {
                "model": name_of(record["case"]),
                "linears, full attention": f"{record['linears']}, {attention}".replace(
                    "bfloat", "bf"
                ),
                "schedule": record["schedule"] + (f" ({kept})" if kept != "-" else ""),
                "steps": steps(record),
                "stock, ms": stock,
                **of_actions(record),
                "all steps": speedup,
            }
        )
    note = "In brackets behind a schedule: shares of columns and neurons; behind the others: stock "
    note += "with 16-bit linears, of another run, and the speed-up over it."
    return f"{numbers(rows, texts=4)}\n\n{source(file, records)}. {note}"


def several_gpus(file: str) -> str:
    """Steps and generations on several GPUs against one, times as of all blocks.

    Args:
        file: of records.
    """
    records = read(file)
    rows = []
    for record in records:
        scale, alone = record["blocks"] / record["measured_blocks"], record["alone"]
        for together in record["together"]:
            ms, over_stock = together["ms"], "-"
            if stock := record.get("stock_ms"):
                over_stock = f"{STEPS * stock / together['generation_ms']['sparse']:.2f}x"
            rows.append(
                {
                    "model": name_of(record["case"]),
                    "GPUs": f"{together['ulysses']} of the heads"
                    if together["guidance"] == 1
                    else f"{together['guidance']} of the branches",
                    **{
                        f"{action}, s": f"{scale * alone['ms'][action] / 1e3:.2f} to "
                        f"{scale * ms[action] / 1e3:.2f} ({together['speedup'][action]:.2f}x)"
                        for action in ("dense", "refresh", "sparse")
                    },
                    "50 steps": f"{together['generation_speedup']['sparse']:.2f}x",
                    "over stock": over_stock,
                    "exchange": f"{together['exposed_share']['sparse']:.0%}",
                    "off by": f"{together['rel_l2']:.1e}",
                }
            )
    return f"{numbers(rows, texts=2)}\n\n{source(file, records)}."


def host_memory() -> str:
    """Sparse steps with all caches in host memory, against all of them on the GPU."""
    file = "offload_h200.json"
    records = read(file)
    rows = [
        {
            "case": name_of(record["case"]),
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
    return f"{numbers(rows)}\n\n{source(file, records)}"


def tiny_wan_time() -> str:
    """Whole generations of tiny-wan on a CPU."""
    file = "end_to_end_cpu.json"
    records = read(file)
    rows = [
        {
            "prompt": record["case"],
            "dense, s": f"{record['baseline_ms'] / 1e3:.1f}",
            "balanced, s": f"{record['latency_ms'] / 1e3:.1f}",
            "speed-up": f"{record['speedup']:.2f}x",
            "PSNR, dB": f"{record['psnr']:.1f}",
            "SSIM": f"{record['ssim']:.3f}",
        }
        for record in records
    ]
    made = steps({"actions": records[0]["schedule"]})
    return f"{numbers(rows)}\n\nSteps: {made}. {source(file, records)}"


def tiny_wan_quality() -> str:
    """Both delta rules by the share of columns, with controls, on tiny-wan."""
    by_share = {
        f"`{rule}`, {parts}": f"{rule}, keep {{}}, {parts}"
        for parts in ("attention", "attention + MLP")
        for rule in RULES
    }
    by_share["kept columns, no cache"] = "control: kept columns only, keep {}, attention"
    others = {
        "64 queries a block, `merge`": "merge, keep 10%, attention, groups of 64 rows",
        "192 queries a block, `merge`": "merge, keep 10%, attention, groups of 192 rows",
        "256 queries a block, `merge`": "merge, keep 10%, attention, groups of 256 rows",
        "raster order, `merge`": "control: raster order, merge, keep 10%, attention",
        "random columns, `merge`": "control: random columns, merge, keep 10%, attention",
        "random columns, `difference`": "control: random columns, difference, keep 10%, attention",
        "cached attention output only": "control: cached output only, attention",
        "MLP alone, 30 % of the neurons": "control: MLP only",
        "tile order alone, nothing sparse": "control: token order alone, all layers dense",
    }
    headings = ("columns kept", "what, at 10 % of the columns")
    return qualities("quality_h200.json", headings, ("5%", "10%", "20%", "30%"), by_share, others)


def captured_mass() -> str:
    """The softmax mass of a query block's best columns, by layer of tiny-wan, mean over steps."""
    file = "captured_mass_h200.json"
    records = [record for record in read(file) if record.get("layer") is not None]
    shares = ("5%", "10%", "20%")
    rows = []
    for layer in unique(records, "layer"):
        found = find(records, layer=layer)
        means = (statistics.fmean(each[f"top_{share}"] for each in found) for share in shares)
        rows.append((str(layer), *(f"{mean:.0%}" for mean in means)))
    columns = ("layer", *(f"best {share} of the columns" for share in shares))
    return f"{table(columns, rows, texts=1)}\n\n{source(file, records)}"


def tiny_flux_quality() -> str:
    """Shares of columns and neurons on tiny-flux, with and without refreshes."""
    by_share = {each: f"keep {{}}, {each}" for each in ("MLP", "attention", "attention + MLP")}
    others = {
        "cached outputs only, MLP": "control: cached output only, MLP",
        "cached outputs only, attention": "control: cached output only, attention",
        "random columns, 10 %": "control: random columns, keep 10%, attention",
        "random columns, 30 %": "control: random columns, keep 30%, attention",
        "all but two steps sparse, 30 %, MLP": "drift over 50 steps, keep 30%, MLP",
        "all but two steps sparse, 30 %, attention": "drift over 50 steps, keep 30%, attention",
    }
    shares = ("10%", "20%", "30%", "40%", "50%")
    return qualities(
        "quality_flux_h200.json", ("kept of each", "control"), shares, by_share, others
    )


def qualities(
    file: str,
    headings: tuple[str, str],
    shares: Sequence[str],
    by_share: dict[str, str],
    others: dict[str, str],
) -> str:
    """Two tables: PSNR by the share kept, then that of the profile and of other cases.

    Args:
        file: of records.
        headings: of the first column of each.
        shares: of the first table's other columns.
        by_share: its rows: the case of each, with a place for the share.
        others: the second table's rows: the case of each.
    """
    records = read(file)
    rows = [
        {headings[0]: name, **{share: quality(records, case.format(share)) for share in shares}}
        for name, case in by_share.items()
    ]
    (profile,) = find(records, case="profile")
    others = {f"the profile, attention + MLP ({steps(profile)})": "profile", **others}
    single = [
        {headings[1]: name, "PSNR, median (worst)": quality(records, case)}
        for name, case in others.items()
    ]
    (first, *_) = find(records, case=next(iter(by_share.values())).format("10%"))
    made = f"Steps, where nothing else is said: {steps(first)}; {first['prompts']} prompts."
    return f"{numbers(rows)}\n\n{numbers(single)}\n\n{made} {source(file, records)}"


def equal_work(workload: str) -> str:
    """Quality at equal work and at equal time of one model and size, and how far ours is ahead.

    Args:
        workload: as in the name of the file of records.
    """
    file = f"equal_work_{workload}_h200.json"
    clips = read_records(RESULTS / file)
    shares = [f"{share:.0%}" for share in TARGETS]

    def rows(axis: Axis) -> list[tuple[str, ...]]:
        found = quality_rows(clips, axis)
        known = [row for row in found if any(row[share] != "-" for share in shares)]
        return [(row["method"], *(row[share] for share in shares)) for row in known]

    by_work = table(("at equal work", *shares), rows("work"), texts=1)
    by_time = table(("at equal time", *shares), rows("time"), texts=1)
    prompts = len({clip["prompt"] for clip in clips})
    made = f"{generation_of(clips[0])}; {prompts} prompts, PSNR in dB: mean (worst)."
    return f"{by_work}\n\n{by_time}\n\n{made} {source(file, clips)}"


def numbers(rows: Sequence[dict[str, str]], *, texts: int = 1) -> str:
    """A table of rows by column; the first columns hold text."""
    return table(list(rows[0]), [list(row.values()) for row in rows], texts=texts)


def read(file: str) -> list[Record]:
    """The records of a file of results."""
    return read_records(RESULTS / file)


def find(records: Iterable[Record], **values: Any) -> list[Record]:
    """The records that have these values."""
    return [each for each in records if all(each.get(k) == v for k, v in values.items())]


def name_of(case: str) -> str:
    """A case as people know it."""
    return CASES.get(case, case)


def unique(records: Iterable[Record], name: str) -> Sequence[str]:
    """The values of a field that are known, in the order in which they come first."""
    return list(dict.fromkeys(each[name] for each in records if each.get(name) is not None))


def quality(records: Iterable[Record], case: str) -> str:
    """Median and worst PSNR of a case in dB."""
    (record,) = find(records, case=case)
    return f"{record['psnr_median']:.1f} ({record['psnr_min']:.1f})"


def steps(record: Record) -> str:
    """How many steps took each action, as in ``1 dense, 5 refresh, 44 sparse``."""
    counts = record["actions"]
    names = [action.value for action in Action if action.value in counts]
    return ", ".join(f"{counts[name]} {name}" for name in names)


def shares(record: Record) -> str:
    """The shares of columns and neurons at sparse steps, where a generation has any."""
    if not record["actions"].get("sparse"):
        return "-"
    return f"{record['density']:.3g}, {record['mlp_density']:.2g}"


def source(file: str, records: Iterable[Record]) -> str:
    """Where and with what it was measured, from the records themselves."""
    facts = {name: "/".join(unique(records, name)) for name in ("device", "torch", "diffusers")}
    triton = "" if "cpu" in facts["torch"] else f", Triton {'/'.join(unique(records, 'triton'))}"
    return (
        f"{facts['device']}, torch {facts['torch']}{triton}, diffusers {facts['diffusers']}; "
        f"[records](../benchmarks/results/{file})"
    )
