"""How long sparse and dense steps take on the GPU that is here: measured once a kind and shape.

Measured is a layer on random tensors, see `random_layers`, before the generation has caches: a
large one is cut to a few heads or tokens and its time scaled, so that it takes a share of a second
and less memory than the layer itself does later. Sizes are rounded up a little, so that prompts of
nearly one length, and both guidance branches, are measured once and decided alike.

What dense attention is compared with is PyTorch's, whatever backend the model was given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from chipsparse.cache.kinds import Part
from chipsparse.common.cache_folder import cache_folder
from chipsparse.common.machine import device_name, package_version
from chipsparse.config import SparsityConfig
from chipsparse.experiments.timing import Call, time_in_turn
from chipsparse.layout import LayerKind, ModelLayout
from chipsparse.measure.cost_model import kept_columns
from chipsparse.measure.known_times import KnownTimes
from chipsparse.measure.random_layers import RandomAttention, RandomMLP
from chipsparse.measure.step_seconds import StepSeconds, estimated_seconds
from chipsparse.plan import SparsityPlan

# A dense step of what is measured takes about this at most by the cost model, one head in any case.
SAMPLE_SECONDS: Mapping[Part, float] = {"attention": 8e-3, "mlp": 2.5e-3}
# What the host does for a sparse layer besides its launches, which a captured step does without.
HOST_SECONDS = 60e-6
# Sizes are rounded up to a multiple of a sixteenth of the power of two below them.
FINENESS, LEAST_STEP = 16, 16
# What else times depend on; raised where what is measured changes.
FORM = 1
PACKAGES = ("torch", "triton", "chipsparse")

Measure = Callable[[Sequence[Call], torch.device, bool], list[float]]


@dataclass(frozen=True)
class Sample:
    """What is measured in the place of a part of a layer.

    Attributes:
        plan: of one layer of its own.
        scale: how many times as long the part itself takes.
    """

    plan: SparsityPlan
    scale: float


class StepClock:
    """Tells the seconds of parts of layers, and remembers them.

    Args:
        known: what earlier processes measured, and what later ones will know.
        note: gets a sentence about what is estimated, not measured.
        measure: milliseconds of each of some calls on a device, captured or not.
        device_type: of the devices that are measured; on others everything runs as the config says.
    """

    def __init__(
        self,
        known: KnownTimes | None = None,
        note: Callable[[str], None] = lambda _: None,
        *,
        measure: Measure = lambda calls, device, captured: time_in_turn(
            calls, device, captured=captured
        ),
        device_type: str = "cuda",
    ) -> None:
        self.device_type = device_type
        self._known = KnownTimes(None) if known is None else known
        self._note = note
        self._measure = measure
        self._found: dict[tuple[object, ...], StepSeconds | None] = {}

    def seconds(
        self,
        plan: SparsityPlan,
        part: Part,
        layers: Sequence[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
        captured: bool,
    ) -> dict[int, StepSeconds]:
        """The times of one part of some layers for one guidance branch.

        Layers of a kind that differ in what they keep are measured at the least and at the most of
        it; what is between takes a time between.

        Args:
            plan: has sizes and shares.
            part: attention or feed-forward layer.
            layers: that the plan has sparse.
            device: where the model runs. One that is not here is estimated.
            dtype: of the hidden states.
            captured: whether sparse steps are replays of a CUDA graph.
        """
        alike: dict[object, list[int]] = {}
        for layer in layers:
            alike.setdefault(plan.layout.kind(layer), []).append(layer)
        found: dict[int, StepSeconds] = {}
        for group in alike.values():
            group.sort(key=lambda layer: (plan.density(layer, part) or 0.0, layer))
            ends = [
                self._seconds(plan, layer, part, device, dtype, captured)
                for layer in (group[0], group[-1])
            ]
            for layer in group:
                if ends[0].measured and ends[1].measured:
                    found[layer] = _between(plan, part, (group[0], layer, group[-1]), *ends)
                else:
                    found[layer] = estimated_seconds(plan, layer, part, dtype=dtype)
        return found

    def _seconds(
        self,
        plan: SparsityPlan,
        layer: int,
        part: Part,
        device: torch.device,
        dtype: torch.dtype,
        captured: bool,
    ) -> StepSeconds:
        if device.type == "cuda" and not torch.cuda.is_available():
            return estimated_seconds(plan, layer, part, dtype=dtype)
        sample = sample_of(plan, layer, part, dtype=dtype)
        key = (sample.plan, part, device, dtype, captured)
        if key not in self._found:
            self._found[key] = self._milliseconds(sample.plan, part, device, dtype, captured)
        found = self._found[key]
        if found is None:
            return estimated_seconds(plan, layer, part, dtype=dtype)
        host = 0.0 if captured else HOST_SECONDS
        return StepSeconds(
            sample.scale * found.sparse + host, sample.scale * found.dense, measured=True
        )

    def _milliseconds(
        self,
        plan: SparsityPlan,
        part: Part,
        device: torch.device,
        dtype: torch.dtype,
        captured: bool,
    ) -> StepSeconds | None:
        """Of a sample, from earlier or now; None where the device has no memory for it."""
        facts = {
            "form": FORM,
            "device": device_name(device),
            "versions": {package: package_version(package) for package in PACKAGES},
            "part": part,
            "layout": dataclasses.asdict(plan.layout),
            "config": dataclasses.asdict(getattr(plan.config, part)),
            "dtype": str(dtype),
            "captured": captured,
        }
        times = self._known.find(facts)
        if times is None:
            try:
                times = self._known.keep(facts, self._run(plan, part, device, dtype, captured))
            except torch.OutOfMemoryError:
                self._note(
                    f"whether sparse {'MLPs' if part == 'mlp' else part} pay was estimated: there "
                    "was no memory to measure it"
                )
                return None
            finally:
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        return StepSeconds(times["sparse"] / 1e3, times["dense"] / 1e3, measured=True)

    @torch.inference_mode()
    def _run(
        self,
        plan: SparsityPlan,
        part: Part,
        device: torch.device,
        dtype: torch.dtype,
        captured: bool,
    ) -> dict[str, float]:
        make = RandomAttention if part == "attention" else RandomMLP
        with torch.autocast(device.type, enabled=False):
            layer = make(plan, 0, device=device, dtype=dtype)
            sparse, dense = self._measure((layer.sparse, layer.unpatched), device, captured)
        return {"sparse": sparse, "dense": dense}


def clock_of_this_machine(note: Callable[[str], None] = lambda _: None) -> StepClock:
    """A clock that keeps what it measures in the user's cache folder; see `StepClock`."""
    folder = cache_folder()
    return StepClock(KnownTimes(None if folder is None else folder / "step-times"), note)


def _between(
    plan: SparsityPlan,
    part: Part,
    layers: tuple[int, int, int],
    least: StepSeconds,
    most: StepSeconds,
) -> StepSeconds:
    """The times of the second of three layers, from those of the first and the last."""
    first, density, last = (plan.density(layer, part) or 0.0 for layer in layers)
    share = 0.0 if last == first else (density - first) / (last - first)
    return StepSeconds(
        least.sparse + share * (most.sparse - least.sparse),
        least.dense + share * (most.dense - least.dense),
        measured=True,
    )


def sample_of(plan: SparsityPlan, layer: int, part: Part, *, dtype: torch.dtype) -> Sample:
    """A layer of its own that takes a known share of the time of a part of a layer.

    Nothing in its plan differs between parts of layers that take the same time.
    """
    dense = estimated_seconds(plan, layer, part, dtype=dtype).dense
    share = min(1.0, SAMPLE_SECONDS[part] / dense)
    sample = _mlp_sample if part == "mlp" else _attention_sample
    return sample(plan, layer, share)


def _attention_sample(plan: SparsityPlan, layer: int, share: float) -> Sample:
    layout = plan.layout
    whole = layout.batch * layout.own_heads
    taken = min(whole, max(1, round(share * whole)))
    batch, heads = (layout.batch, layout.own_heads) if taken == whole else (1, taken)
    columns = _rounded(layout.tokens)
    rows = min(columns, _rounded(layout.own_query_rows)) if layout.exact_text else columns
    alone = ModelLayout(
        (LayerKind("", 1, 1),),
        heads,
        layout.head_dim,
        batch,
        ((1, 1, rows),),
        text_tokens=columns - rows,
        text_first=True,
        exact_text=rows < columns,
    )
    config = replace(
        plan.config.attention,
        density=min(1.0, _rounded(kept_columns(plan, layer)) / columns),
        random_fraction=0.0,
        local_blocks=None,
    )
    own = layout.own_query_rows / len(layout.all_query_rows)  # other processes have the others
    scale = own * whole / (batch * heads)
    return Sample(SparsityPlan(SparsityConfig(attention=config), alone), scale)


def _mlp_sample(plan: SparsityPlan, layer: int, share: float) -> Sample:
    layout, density = plan.layout, plan.density(layer, "mlp")
    kind = layout.kind(layer)
    rows = _rounded(layout.batch * layout.mlp_tokens(layer))
    taken = min(rows, _rounded(round(share * rows)))
    assert density is not None
    alone = ModelLayout(
        (LayerKind("", 1, kind.intermediate_size, mlp_linears=kind.mlp_linears),),
        1,
        layout.width,
        1,
        ((1, 1, taken),),
    )
    config = replace(plan.config.mlp, density=density)
    return Sample(SparsityPlan(SparsityConfig(mlp=config), alone), rows / taken)


def _rounded(count: int) -> int:
    """A size that others near it have, too: the next larger one on a coarse scale."""
    step = max(LEAST_STEP, (1 << max(0, count.bit_length() - 1)) // FINENESS)
    return -(-count // step) * step
