"""Which denoising steps need not be computed, because the output would hardly change."""

from __future__ import annotations

from collections.abc import Callable

import torch


class StepCache:
    """Decides for each denoising step whether the output that was computed last will do.

    The rule is that of EasyCache (Zhou et al. 2025, "Less is Enough: Training-Free Video Diffusion
    Acceleration via Runtime-Adaptive Caching", arXiv 2507.02860), which looks at nothing but the
    transformer's input x and output v. Of two computed steps, i and then j, it takes the rate

        k = |v_j - v_i| / |x_j - x_i|

    which hardly changes from one step to the next once the first ones are over, and predicts that
    at a later step n the output has changed, as a share of itself, by

        k * |x_n - x_j| / |v_j|

    where |.| is the mean absolute value. The step is skipped where that is below the threshold.
    Two things differ from the paper. It reuses v_j - x_j and adds up the changes of x from step to
    step; here v_j itself is reused, so x_n is compared with x_j, and the sum could only be larger.
    And where v_i was computed sparsely and v_j in full, so that they differ by the error of v_i as
    well, the rate from before stays.

    One decision holds for the whole batch and for all guidance branches of a step: that of the
    branch which comes first, whose outputs alone are measured. It costs a pass over the input,
    another over the output, and one wait for the device, so that the host does not run ahead into
    the next step; what a computed step measures is two such passes and no wait.

    Args:
        threshold: share of the output below which its change does not matter.
        max_skips: most steps in a row that are skipped.
        agree: the prediction that counts where several processes make one; by default one's own.

    Attributes:
        predicted: the change that was predicted for the step in progress; None where nothing was
            predicted, because the step had to be computed or two outputs were not yet known.
    """

    predicted: float | None

    def __init__(
        self,
        threshold: float,
        max_skips: int,
        agree: Callable[[float | None], float | None] = lambda predicted: predicted,
    ) -> None:
        self._threshold = threshold
        self._max_skips = max_skips
        self._agree = agree
        self._step: int | None = None
        self._leader = ""  # the branch that came first in this step
        self._skipping = False
        self._since_computed = 0  # steps that began after the last computed one
        self.predicted = None
        self.release()

    def release(self) -> None:
        """Gives up the tensors; what was decided for the step in progress still holds."""
        self._measured: str | None = None  # the branch whose input and output these are
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._sparse = False  # whether the output was computed sparsely
        self._rate: torch.Tensor | None = None  # k, on the device
        self._current: torch.Tensor | None = None

    def skips(self, step: int, branch: str, latents: torch.Tensor, *, allowed: bool) -> bool:
        """Whether a call is skipped; to be asked before every call, be it skipped anyway.

        Args:
            step: from 0.
            branch: guidance branch.
            latents: the transformer's input, of any shape, the same for all steps.
            allowed: whether this branch may skip this step. One that may not never does, and where
                that is the first one, no branch does.
        """
        if step != self._step:
            self._step, self._leader, self._current = step, branch, latents
            self._since_computed += 1
            possible = allowed and self._since_computed <= self._max_skips
            self.predicted = self._agree(self._predict(latents)) if possible else None
            self._skipping = self.predicted is not None and self.predicted < self._threshold
        return allowed and self._skipping

    def _predict(self, latents: torch.Tensor) -> float | None:
        if self._rate is None or self._measured != self._leader:
            return None
        assert self._output is not None
        size = self._output.float().abs().mean()
        return float(self._rate * _distance(latents, self._input) / size)

    def computed(self, branch: str, output: torch.Tensor, *, sparse: bool = False) -> None:
        """Measures the output of a call that was computed.

        Args:
            branch: guidance branch of the call.
            output: what it returned, of any shape, the same for all steps; kept, not copied.
            sparse: whether parts of it were reused.
        """
        if branch != self._leader or self._current is None:
            return
        latents = self._current.clone()  # the pipeline may change it in place
        if self._measured != branch:
            self._rate = None
        elif sparse or not self._sparse:
            self._rate = _distance(output, self._output) / _distance(latents, self._input)
        self._measured, self._input, self._output = branch, latents, output
        self._sparse = sparse
        self._current = None
        self._since_computed = 0


def _distance(new: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Mean absolute difference in fp32, a scalar on the device."""
    assert old is not None
    return (new.float() - old.float()).abs().mean()
