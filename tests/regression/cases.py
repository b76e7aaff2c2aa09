"""What the regression tests generate, and how close it must come."""

from dataclasses import dataclass, field
from typing import Any

from tests.schedules import listed


@dataclass(frozen=True)
class Bounds:
    """How close a sparse result must come; `benchmarks/notes/regression.md` says why these."""

    psnr: float  # least PSNR in dB against dense of the same machine
    ssim: float  # least SSIM against the same
    flicker: float | None  # most that it may differ from dense's, as a factor; None for an image
    golden: float  # least PSNR in dB of both results against the golden files, in float32
    golden_half: float  # the same of the sparse result in fp16 and bf16


@dataclass(frozen=True)
class Case:
    """One clip or image, to be made dense and sparse.

    The profile of the model holds what is not changed here, with the quality ``chipmunk``, which
    has all actions.
    """

    name: str  # also of its golden files; it begins with that of the model
    prompt: str
    seed: int
    bounds: Bounds
    arguments: dict[str, Any] = field(default_factory=dict)  # changes of the generation settings
    sparsity: dict[str, Any] = field(default_factory=dict)  # changes of the sparsity config
    slow: bool = True

    @property
    def model(self):
        """The folder below ``assets``."""
        return f"tiny-{self.name.partition('-')[0]}"


# Steps skipped between the refreshes of the published schedule, ever more of them.
SKIPS = listed("DDDDDDDRSSSSKSRSKSKSKSKRSKSKSKSKSKSRKKSKKKKKSKKDDD")
# Every action, and a second refresh with sparse steps on both sides.
SHORT = {"attention.delta_rule": "block_means", **listed("DRSSRSKS")}
SHORT_STEPS = 8
DIFFERENCE = {"attention.delta_rule": "difference", "attention.density": 0.2}
LAYERS = {"attention.delta_rule": "block_means", "attention.density": 0.2, "mlp.density": "dense"}
FIRST_DENSE = {"layers": [{"index": 0, "attention": "dense", "mlp": "dense"}]}
STEPS = {"listed": {"full": [0, 1, 2, 3, 5, 8, 12], "sparse": [6, 10, 14]}}
FORECAST = {"forecast": 0.5, "forecast_after": 0.2}
SMALL = {"height": 96, "width": 96, "num_frames": 17}

CASES = {
    case.name: case
    for case in (
        Case(
            "flux",
            "a red circle to the left of a yellow square over a blue gradient",
            seed=0,
            arguments={"height": 192, "width": 192, "num_inference_steps": SHORT_STEPS},
            # Of 640 columns the 64 of the text are kept anyhow.
            sparsity={**SHORT, "attention.density": 0.2},
            bounds=Bounds(psnr=24, ssim=0.92, flicker=None, golden=50, golden_half=32),
            slow=False,
        ),
        Case(
            "wan",
            "a red circle moves left over a blue gradient",
            seed=1,
            arguments={**SMALL, "num_inference_steps": SHORT_STEPS},
            sparsity=SHORT,
            bounds=Bounds(psnr=26, ssim=0.94, flicker=1.25, golden=42, golden_half=33),
        ),
        Case(
            "flux-skips",
            "a yellow heart below a red triangle over gray stripes",
            seed=1,
            sparsity=SKIPS,
            bounds=Bounds(psnr=36, ssim=0.98, flicker=None, golden=46, golden_half=42),
        ),
        Case(
            "flux-difference",
            "a cyan star in the upper right and a red ring in the lower left over purple dots",
            seed=2,
            arguments={"num_inference_steps": 16},
            sparsity={**DIFFERENCE, **listed("DDDDDRSSSSRSSSDD")},
            bounds=Bounds(psnr=34, ssim=0.985, flicker=None, golden=42, golden_half=38),
        ),
        Case(
            "wan-skips",
            "a green square moves down over a purple background",
            seed=1,
            arguments=SMALL,
            sparsity=SKIPS,
            bounds=Bounds(psnr=31, ssim=0.97, flicker=1.2, golden=42, golden_half=38),
        ),
        Case(
            "wan-difference",
            "a yellow star moves right over a gray checkerboard",
            seed=2,
            arguments={"num_frames": 9, "num_inference_steps": 12},
            sparsity={**DIFFERENCE, **listed("DDDDRSSRSSDD")},
            bounds=Bounds(psnr=35, ssim=0.99, flicker=1.15, golden=42, golden_half=38),
        ),
        Case(
            "wan-listed",
            "a cyan circle moves right over a plain gray background",
            seed=4,
            arguments={"num_frames": 9, "num_inference_steps": 16},
            sparsity={**LAYERS, **FIRST_DENSE, "schedule": {**STEPS, **FORECAST}},
            bounds=Bounds(psnr=30, ssim=0.97, flicker=1.15, golden=42, golden_half=38),
        ),
        Case(
            "wan-full-size",
            "a large yellow square bounces over purple stripes",
            seed=3,
            arguments={"num_inference_steps": SHORT_STEPS},
            sparsity=SHORT,
            bounds=Bounds(psnr=21, ssim=0.9, flicker=1.25, golden=32, golden_half=22),
        ),
    )
}
