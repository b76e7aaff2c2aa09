"""The work of `chipsparse compare --suite`: all clips of a suite, its numbers and its page."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import chipsparse
from chipsparse.cli.compare.options import MEASURED, CompareOptions
from chipsparse.cli.compare.suite_record import OURS, Row, Sample, SuiteResult
from chipsparse.cli.errors import UserError, described
from chipsparse.cli.media import write as media
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.model.weights import weights_digest
from chipsparse.cli.progress import duration
from chipsparse.cli.prompts import first_prompts, shapes
from chipsparse.cli.ranks import Rank, check_alone
from chipsparse.cli.request import choose_profile, device_name, required_profile, resolve, working
from chipsparse.cli.views.names import bundled_name, name_of, without_folders
from chipsparse.cli.views.page import check_charts, page
from chipsparse.cli.views.sections import Facts, Section
from chipsparse.cli.views.terminal import print_result, print_sections
from chipsparse.cli.views.units import counted
from chipsparse.common.machine import package_version
from chipsparse.experiments.clips import ClipMaker
from chipsparse.experiments.engine import Experiment, Way, sparse_way
from chipsparse.experiments.rivals import CALIBRATION, MAG, suite_rivals
from chipsparse.experiments.samples import Sample as PromptSample
from chipsparse.experiments.store import Store
from chipsparse.profiles.tuned_range import digest

TO_SEND, PAGE = "suite.json", "suite.html"
BUNDLED_COUNT = 12  # prompts, where no file of them is given
QUALITIES = {"faithful": 0.6, "balanced": 0.5, "fast": 0.4}  # about, of a dense clip


def run_suite(options: CompareOptions) -> None:
    """Check all that is cheap to check, make the clips that are missing, and tell."""
    check_alone("--suite")
    check_charts()
    options = dataclasses.replace(options, model=options.suite)
    folder = options.folder
    with working(options, Rank()) as (model, device, dtype, display):
        request = resolve(
            options,
            model=model,
            device=device,
            dtype=dtype,
            instead="a suite generates from prompts alone",
            optional=True,
        )
        settings = request.settings
        suffix = ".mp4" if model.accepts("num_frames") else ".png"
        media.check_output(
            (folder if folder.is_dir() else folder.parent) / f"suite{suffix}", fps=options.fps
        )
        samples = _samples(options, model)
        common = _environment(request.model, request.settings, options, device, dtype)
        store = Store(
            folder / MEASURED, _about(common, model), kind="suite clips", dense=folder / "dense"
        )
        maker = ClipMaker(
            request.load,
            partial(settings.pipeline_call, negative_prompt=options.negative_prompt),
            settings.num_inference_steps,
            display,
            plain_lines=1,
        )
        ways = [*suite_rivals(maker, store, samples[0]), *_ours(options, model)]

        def write(way: Way, sample: PromptSample, frames: np.ndarray) -> None:
            file = folder / clip_file(way, sample, suffix)
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"{file.parent} could not be made: {error.strerror}") from error
            media.write_media({file: frames}, fps=options.rate)

        experiment = Experiment(maker, samples, store, describe=described, write=write)
        mag = any(way.method == MAG for way in ways) and CALIBRATION not in store.measured
        also = {CALIBRATION: 1.0} if mag else {}
        told = False
        for sample in samples:
            experiment.plan(ways, **also)
            for _ in experiment.run(ways, [sample]):
                seconds, left = display.seconds_left(), experiment.plan(ways, **also)
                if not told and left and seconds is not None:
                    told = True
                    display.tell(
                        f"{counted(left, 'clip')} to make, about {duration(seconds)}; the same "
                        "command goes on where it was broken off"
                    )
            result = _result(common, experiment, ways, options, suffix)
            _write(folder / TO_SEND, json.dumps(result.to_json(), indent=1, ensure_ascii=False))
        with display.stage(f"writing {folder / PAGE}"):
            _write(folder / PAGE, page([(folder / TO_SEND, result)]))
    print_result(result, as_json=options.json)
    if not options.json:
        hidden = "" if options.with_prompts else ", without the prompts"
        files = [("page", str(folder / PAGE)), ("to send", f"{folder / TO_SEND}{hidden}")]
        print_sections(Console(), [Section("", [Facts(files)])])


def _samples(options: CompareOptions, model: ModelDescription) -> list[PromptSample]:
    """Return the prompts of ``--prompts``, or bundled ones.

    What the bundled models were trained on are scenes of their own.
    """
    own = shapes(video=model.accepts("num_frames"))
    return first_prompts(
        options.prompts,
        bundled="suite.txt" if bundled_name(model.location) is None else own,
        usual=BUNDLED_COUNT,
        count=options.count,
        seed=options.seed,
    )


def _ours(options: CompareOptions, model: ModelDescription) -> Iterator[Way]:
    """Yield the named qualities; a profile without any, as of a tuning, is the only way."""
    profile = choose_profile(options, model, optional=True)
    if profile is not None and not profile.qualities:
        name = f"{OURS} profile"
        yield sparse_way(name, profile, cost=0.5, method=OURS, setting=name_of(profile.source))
        return
    for quality, cost in QUALITIES.items():
        name, asked = f"{OURS} {quality}", dataclasses.replace(options, quality=quality)
        try:
            profile = required_profile(asked, model)
        except UserError as error:
            yield Way(name, _refuse, refused=str(error), method=OURS)
        else:
            setting = f"--quality {quality}"
            yield sparse_way(name, profile, cost=cost, method=OURS, setting=setting)


def _refuse(pipe: Any) -> Any:
    raise AssertionError("a refused way is never applied")


def clip_file(way: Way, sample: PromptSample, suffix: str) -> str:
    """Return the name of a clip to look at, in the folder: one for each config of ours."""
    name = way.key if way.method == OURS and way.key else way.name
    return f"clips/{sample.name}-{name.replace(',', '').replace(' ', '-')}{suffix}"


def _environment(
    model: ModelDescription,
    settings: Any,
    options: CompareOptions,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return what all clips have in common; none of it says whose machine it was."""
    packages = ("diffusers", "transformers", "triton")
    return {
        "model": name_of(model.location),
        "pipeline_class": model.pipeline_class.__name__,
        "transformer_class": model.transformer_class,
        "transformer_config": digest(model.transformer_config),
        "settings": dataclasses.asdict(settings),
        "flow_shift": options.flow_shift,
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "versions": {
            "chipsparse": chipsparse.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            **{name: package_version(name) for name in packages},
        },
    }


def _about(common: Mapping[str, Any], model: ModelDescription) -> dict[str, Any]:
    """Return what clips must have in common to be compared with each other."""
    facts = {name: value for name, value in common.items() if not isinstance(value, dict)}
    versions = {name: text for name, text in common["versions"].items() if name != "python"}
    return {**facts, **common["settings"], **versions, "weights": weights_digest(model)}


def _result(
    common: Mapping[str, Any],
    experiment: Experiment,
    ways: Sequence[Way],
    options: CompareOptions,
    suffix: str,
) -> SuiteResult:
    """Return the clips that were made so far, and what they come to."""
    dense = experiment.dense_way
    made = [sample for sample in experiment.samples if experiment.record(dense, sample)]
    kept = {
        way.name: {s: record for s in made if (record := experiment.record(way, s)) is not None}
        for way in (dense, *ways)
    }
    clips = [record for way in ways for record in kept[way.name].values()]
    missing = next((record.lpips_missing for record in clips if record.lpips_missing), None)
    rows = [
        Row.of(
            way.name,
            way.method,
            way.setting,
            experiment.refusal(way),
            list(kept[way.name].values()),
        )
        for way in ways
    ]
    ran = [way for way in (dense, *ways) if experiment.refusal(way) is None]
    complete = [sample for sample in made if all(sample in kept[way.name] for way in ran)]
    ours = [way.name for way in ran if way.method == OURS]

    def lowest(sample: PromptSample) -> float:
        psnrs = (kept[name][sample].psnr_db for name in ours)
        return min((psnr for psnr in psnrs if psnr is not None), default=math.inf)

    farthest = min(complete, key=lowest, default=None)
    return SuiteResult(
        **common,
        lpips_missing=None if missing is None else without_folders(missing),
        asked=len(experiment.samples),
        seeds=[sample.seed for sample in made],
        texts=[sample.prompt for sample in made] if options.with_prompts else None,
        dense_seconds=[record.seconds for record in kept[dense.name].values()],
        rows=rows,
        sample=None
        if farthest is None
        else Sample(
            seed=farthest.seed,
            files={way.name: clip_file(way, farthest, suffix) for way in ran},
        ),
    )


def _write(file: Path, text: str) -> None:
    with media.written_whole("--output", file) as half:
        half.write_text(text, encoding="utf-8")
