"""Readers of a transformer's call: its sizes, latents and timestep, and why it stays dense.

A family whose model takes other arguments has a reader of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar, cast

import torch

from chipsparse.layout import Grid, ModelLayout
from chipsparse.pipelines.denoising_loop import DenoisingLoop, largest, value_passed_as
from chipsparse.pipelines.family_facts import FamilyFacts
from chipsparse.pipelines.ops import forward_arguments
from chipsparse.pipelines.parallel.split_sequence import SplitSequence
from chipsparse.pipelines.tensor_facts import TensorFacts
from chipsparse.skip.position import Place
from chipsparse.sparse.session import SparseSession

Fact = TypeVar("Fact")
Arguments = dict[str, Any]  # of a call of the transformer's ``forward``, by name


class CallReader:
    """Reads the calls of one transformer."""

    def __init__(
        self,
        family: FamilyFacts,
        transformer: torch.nn.Module,
        session: SparseSession,
        split: SplitSequence | None,  # this process's share of the tokens; None: all of them
        loop: DenoisingLoop,
    ) -> None:
        self.family = family
        self.model = cast(Any, transformer)
        self.session = session
        self.split = split
        self.loop = loop
        self._names = forward_arguments(transformer)

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Return the arguments of a call by name."""
        if len(args) > len(self._names):
            raise ValueError(
                f"this {type(self.model).__name__} has a forward() that does not name all "
                f"{len(args)} positional arguments it is called with; pass them by keyword",
            )
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    # Sizes.

    def layout(self, arguments: Arguments) -> ModelLayout:
        """Return the sizes of a call."""
        return self.family.sizes(
            self.model.config,
            grids=self.grids(arguments),
            text_tokens=self.text_tokens(arguments),
            batch=len(self.latents(arguments)),
        )

    def grids(self, arguments: Arguments) -> tuple[Grid, ...]:
        """Return the grids of tokens, here of a video or image ``[B, C, (F,) H, W]``."""
        _, _, *frames, rows, columns = self.latents(arguments).shape
        return self.family.grids(self.model.config, (frames[0] if frames else 1, rows, columns))

    def text_tokens(self, arguments: Arguments) -> int:
        """Return the number of text tokens in the sequence."""
        if self.family.text.where == "cross-attention":
            return 0
        return arguments["encoder_hidden_states"].shape[1]

    def latents(self, arguments: Arguments) -> torch.Tensor:
        """Return what the transformer is to denoise, as one tensor of any shape."""
        return arguments["hidden_states"]

    # Steps.

    def own_timestep(self, arguments: Arguments) -> Any:
        """Return the timestep of what a call denoises, which may have others besides."""
        return arguments[self.family.timestep.argument]

    def scheduled_timestep(self, timestep: Any, schedule: Any) -> float:
        """Return the scheduler's own value of the timestep that the transformer is called with.

        May wait for the device, and is only asked where the scheduler does not tell its step.
        Without a schedule, a timestep that rises is negative, so that it falls.
        """
        facts = self.family.timestep
        value = value_passed_as(timestep, schedule, lambda values: values / facts.scale)
        if value is not None:
            return value
        return largest(timestep) * (-1 if facts.rises else facts.scale)

    def row_of_loop(self) -> tuple[int | None, int | None]:
        """Return step and number of steps of a loop whose steps are not the scheduler's."""
        return None, None

    def repeated(self, result: Any) -> Any:
        """Return what a skipped call gives again of the result of a computed one."""
        return result

    @property
    def branches(self) -> int | None:
        """Guidance branches of the open call, which the reader has divided it into; None: not."""
        return None

    # What runs dense, or as the model's own.

    def dense_because(self, arguments: Arguments) -> str | None:
        """Return why no attention of a call can run sparse, or None."""
        reasons = self.family.attention.dense_arguments.items()
        return next((why for name, why in reasons if arguments.get(name) is not None), None)

    def needs_mask(self, arguments: Arguments) -> bool:
        """Return whether attention of a call runs with a mask of the model's own."""
        return self.dense_because(arguments) is not None

    def masks_text(self, arguments: Arguments) -> bool:
        """Return whether the model masks padded text in a call for which ours is cut instead."""
        return False

    def why_whole(self, arguments: Arguments) -> str | None:
        """Return why several processes cannot share the tokens of a call, or None."""
        return None

    def why_not_captured(self) -> str | None:
        """Return why sparse steps of a generation may not all do the same, or None."""
        return None

    def notes(self, arguments: Arguments) -> list[str]:
        """Return notes for the report on a call, besides what runs dense."""
        return []

    def knows(self, place: Place, arguments: Arguments) -> bool:
        """Return whether `layout` can tell the sizes of a call; if not, it runs as the model's."""
        return True

    def observe(self, place: Place, arguments: Arguments) -> bool:
        """Report why a call that is not known runs as the model's.

        Returns:
            Whether the generation begins anew, with feed-forward layers as diffusers made them.
        """
        return False

    @property
    def is_ours(self) -> bool:
        """True where attention of the open call is ours, or exchanged with other processes."""
        return self.session.attends or self.split is not None


def remembered(read: Callable[..., Fact]) -> cached_property[TensorFacts[Fact]]:
    """Return an attribute of a reader or a token order: the `TensorFacts` of each instance."""
    return cached_property(lambda owner: TensorFacts(read, lambda: owner.loop.is_undisturbed))
