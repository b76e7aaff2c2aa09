"""Tags for attention modules whose processor takes no mask, or reshapes it."""

from __future__ import annotations

import copy
from typing import Any

from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.patches import TAG


class ProcessorTaggingAdapter(ModelAdapter):
    """An adapter whose tags travel as the ``_parallel_config`` of the processors.

    Processors hand it to the attention backend as it is. Each module gets a processor of its own
    for that, a copy, because several modules may share one.
    """

    def hook_attention(self, module: Any) -> None:
        """Leaves the arguments as they are."""

    def claim_attention(self) -> None:
        """Gives each module a processor with its tag, and leads that to our backend."""
        for module in self.self_attentions():
            self._give_tagged_processor(module)
        super().claim_attention()

    def _give_tagged_processor(self, module: Any) -> None:
        shared = module.processor
        tagged = copy.copy(shared)
        tagged._parallel_config = getattr(module, TAG)
        module.processor = tagged

        def restore() -> None:
            tagged._parallel_config = shared._parallel_config  # somebody may have kept it
            if module.processor is tagged:  # and not one that was set since
                module.processor = shared

        self._attention_patches.add_undo(restore)
