"""A training run: a model, the moving average of its weights, its optimizers, and how to go on."""

from __future__ import annotations

import argparse
import copy
import math
from pathlib import Path

import torch
from common import Ranks, Schedule, update_average
from muon import Muon
from torch import Tensor, nn


def add_run_arguments(parser: argparse.ArgumentParser, *, steps: int, seconds: float) -> None:
    """The arguments of every script that trains in steps and can be resumed."""
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on from OUT/state.pt")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seconds", type=float, default=seconds, help="all runs together")
    parser.add_argument("--pause-after", type=float, default=math.inf, help="seconds of this run")


def muon_and_adamw(
    matrices: list[Tensor],
    params: list[Tensor],
    *,
    lr: float,
    adamw_lr: float,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    fused: bool | None = None,
) -> list[torch.optim.Optimizer]:
    """Muon for `matrices`, with momentum and weight decay, and AdamW for the rest of `params`."""
    taken = {id(p) for p in matrices}
    others = [p for p in params if id(p) not in taken]
    return [
        Muon(matrices, lr=lr, momentum=momentum, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.99), weight_decay=0.0, fused=fused),
    ]


class Training:
    """All that changes while a model trains.

    Args:
        model: what to train; parameters that need no gradient stay as they are
        optimizers: of its parameters, at the peak of their learning rates
        args: those of `add_run_arguments`; with --resume, goes on from OUT/state.pt
        warmup: steps until the learning rates are at their peak
        decay_from: share of the training after which they fall, to 1 %
        ema: decay of the weights' moving average, `average`
        ranks: the processes that train the same model
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        args: argparse.Namespace,
        *,
        warmup: int,
        decay_from: float,
        ema: float,
        ranks: Ranks,
    ) -> None:
        self.model, self.optimizers, self.ranks = model, optimizers, ranks
        self.warmup, self.decay_from, self.ema = warmup, decay_from, ema
        self.peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
        self.average = copy.deepcopy(model).requires_grad_(False).eval()
        pairs = zip(model.parameters(), self.average.parameters(), strict=True)
        trained = [(param, average) for param, average in pairs if param.requires_grad]
        self.params = [param for param, _ in trained]
        self.averages = [average for _, average in trained]
        step, spent = 0, 0.0
        if args.resume:
            state = torch.load(args.out / "state.pt", map_location=ranks.device)
            model.load_state_dict(state["model"])
            self.average.load_state_dict(state["average"])
            for optimizer, values in zip(optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(values)
            step, spent = state["step"], state["spent"]
        self.schedule = Schedule(
            steps=args.steps,
            seconds=args.seconds,
            pause_after=args.pause_after,
            step=step,
            spent=spent,
            ranks=ranks,
        )

    @property
    def step(self) -> int:
        """Steps taken, all runs together."""
        return self.schedule.step

    def update(self, loss: Tensor) -> float:
        """Takes a step against the gradients of `loss`; returns Muon's learning rate."""
        loss.backward()
        self.ranks.average_gradients(self.params)
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        rate = self.schedule.rate(warmup=self.warmup, decay_from=self.decay_from)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad()
        weights = [param.detach() for param in self.params]
        update_average(self.averages, weights, step=self.step, decay=self.ema)
        self.schedule.advance()
        return self.peaks[0] * rate

    def save(self, out: Path) -> None:
        """Writes OUT/state.pt, for --resume."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "spent": self.schedule.spent,
        }
        torch.save(state, out / "state.pt")
