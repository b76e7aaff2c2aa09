"""``python -m benchmarks.equal_work.schedules -o DIR``: the profiles of ours that are compared.

From dense generations of the first prompts alone, without trying a candidate: full steps where
dynamic programming over the costs of jumps puts them, with sparse steps between them (a folder for
each error that they are taken to leave behind) and with none (``skips``). Each folder has a profile
for every share of the work, with the forecast of skipped outputs that leads least astray there.
Skipped steps are corrected, and folders named so, unless they are asked not to be. With many full
steps the lists are close for longer at the start, for clips whose early errors grow most.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.clips import Workload, asked_for
from benchmarks.equal_work.command import size
from benchmarks.equal_work.work import DenseWork
from chipsparse.config import SparsityConfig
from chipsparse.tuning.calibration import SchedulerTap
from chipsparse.tuning.forms import USUAL_DENSITY, USUAL_GROWTH, ActionSeconds, Form, Lists
from chipsparse.tuning.jump_costs import Reuse
from chipsparse.tuning.placed_steps import Steps

SHARES = (0.22, 0.25, 0.33, 0.4, 0.5)
# From this share on errors are taken to grow faster. Of 31 clips, half of the steps in full, the
# mean is 0.6 dB less and the worst 8.8 more; at a third 3.7 less and 6.6 more.
SAFE_FROM, SAFE_GROWTH = 0.4, 2.0
# Shares, and when they begin.
FORECASTS = ((0.0, 0.0), (0.25, 0.2), (0.5, 0.2), (0.75, 0.2), (1.0, 0.2), (0.5, 0.0))
ERRORS = (0.3,)


def main() -> None:
    """Generates, searches and writes."""
    args = parse_arguments()
    dtype = getattr(torch, args.dtype)
    prompts = args.prompts.read_text(encoding="utf-8").splitlines()
    device = torch.device(args.device)
    workload = Workload(args.model, prompts, device, dtype, flow_shift=args.flow_shift)
    settings = asked_for(args)
    refresh, sparse = step_work(workload, settings)
    print(f"work of a refresh {refresh:.3f}, of a sparse step {sparse:.3f}", flush=True)
    trajectories = []
    for seed, prompt in enumerate(prompts[: args.count]):
        with SchedulerTap(workload.pipe.scheduler) as tap:
            workload.generate(None, prompt, seed=seed, **settings)
        trajectories.append(tap.trajectory())
    seconds = ActionSeconds(1.0, refresh, {(USUAL_DENSITY, False): sparse}, 0.0, 0.0)
    lists = Lists(trajectories, seconds)
    start = "corrected_" if args.correct else ""
    end = "" if args.growth is None else f"_growth_{args.growth:g}"
    form = Form(reuse=Reuse(correct=args.correct))
    found = {f"{start}skips{end}": placed(lists, args.steps, form, args.growth)}
    for error in ERRORS:
        sparse_form = replace(form, sparse_error=error)
        name = f"{start}sparse_{error:g}{end}"
        found[name] = placed(lists, args.steps, sparse_form, args.growth)
    for folder, profiles in found.items():
        for share, (steps, reuse) in profiles.items():
            if "sparse" in folder and not steps.sparse:
                continue  # nothing sparse pays there: the list is that of skips
            text = profile(workload, settings, steps, reuse)
            file = args.output / folder / f"{share:g}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(folder, share, reuse.forecast, reuse.forecast_after, letters(steps, args.steps))


def parse_arguments() -> argparse.Namespace:
    """Of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("assets/tiny-wan"))
    parser.add_argument("--prompts", type=Path, default=Path("assets/prompts/shapes.txt"))
    parser.add_argument("--count", type=int, default=4, help="prompts to calibrate with")
    parser.add_argument("--size", type=size, help="HEIGHTxWIDTH[xFRAMES], default the profile's")
    parser.add_argument("--flow-shift", type=float, help="default: the scheduler's")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--growth", type=float, help="of errors, in the search; default by share")
    parser.add_argument("--correct", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the profiles")
    return parser.parse_args()


def sparsity(steps: Steps | None, reuse: Reuse, **schedule: Any) -> dict[str, Any]:
    """A profile's sparsity; without sparse steps for a list of skips."""
    is_sparse = steps is None or bool(steps.sparse)
    if steps is not None:
        schedule |= {"full_steps": list(steps.full), "between": reuse.between}
        schedule |= {"forecast": reuse.forecast, "forecast_after": reuse.forecast_after}
        schedule["correct"] = reuse.correct
    if is_sparse:
        schedule["first_dense_layers"] = 1
        if steps is not None:
            schedule["sparse_steps"] = list(steps.sparse or ())
    attention = {"enabled": is_sparse, "density": USUAL_DENSITY, "delta_rule": "difference"}
    return {
        "attention": attention | {"random_fraction": 0.0},
        "mlp": {"enabled": False},
        "schedule": schedule,
        "cuda_graphs": "always",
    }


def step_work(workload: Workload, settings: dict[str, Any]) -> tuple[float, float]:
    """The work of a refresh and of a sparse step, in dense ones, by short generations."""

    def generate(config: SparsityConfig | None, steps: int) -> Any:
        short = settings | {"num_inference_steps": steps}
        return workload.generate(config, workload.prompts[0], **short).report

    dense = DenseWork.measured(workload.pipe.transformer, lambda: generate(None, 2))

    def work(*actions: str) -> float:
        config = SparsityConfig().override(sparsity(None, Reuse(), actions=list(actions)))
        return dense.of_report(generate(config, len(actions)))

    # A refresh that no sparse step follows is made a dense step.
    step, one = work("dense"), work("dense", "refresh", "sparse")
    sparse = work("dense", "refresh", "sparse", "sparse") - one
    return (one - step - sparse) / step, sparse / step


def placed(
    lists: Lists, steps: int, form: Form, growth: float | None
) -> dict[float, tuple[Steps, Reuse]]:
    """For each share of the work the best steps, with the forecast that leads least astray."""
    found = {}
    for share in SHARES:
        count = share * steps
        usual = SAFE_GROWTH if share >= SAFE_FROM else USUAL_GROWTH
        grown = replace(form, growth=usual if growth is None else growth)
        forms = [
            replace(grown, reuse=replace(form.reuse, forecast=forecast, forecast_after=after))
            for forecast, after in FORECASTS
        ]
        best = min(forms, key=lambda form: lists.drift(form, count))
        found[share] = lists.steps(best, count), best.reuse
    return found


def profile(workload: Workload, settings: dict[str, Any], steps: Steps, reuse: Reuse) -> str:
    """The text of a profile's file."""
    content = {
        "model_class": type(workload.pipe.transformer).__name__,
        "description": "of a comparison at equal work",
        "generation": workload.settings(**settings),
        "sparsity": sparsity(steps, reuse) | tile_of(workload),
    }
    text: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=99)
    return text


def tile_of(workload: Workload) -> dict[str, Any]:
    """The tile of the model's own profile, if it has one."""
    tile = workload.profile.sparsity.tile
    return {"tile": list(tile) if isinstance(tile, tuple) else tile}


def letters(steps: Steps, count: int) -> str:
    """Full (F), sparse (S) and skipped (.) steps."""
    sparse = steps.sparse or ()
    return "".join("F" if i in steps.full else "S" if i in sparse else "." for i in range(count))


if __name__ == "__main__":
    main()
