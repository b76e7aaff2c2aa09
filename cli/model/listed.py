"""The result of `chipsparse models`: which models can run sparse, and what of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import diffusers

from chipsparse.cli.model.description import default_arguments
from chipsparse.cli.views.sections import Facts, Record, Result, Section
from chipsparse.config import Part
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.registry import ADAPTERS, OTHER_CLASSES

PIPELINES = (
    "plain and modular ones of diffusers; a modular one calls the transformer once for each branch "
    "of its guider"
)
OTHERS = "refused; of those that diffusers has, each with its reason:"


class ModelRow(Record):
    """The models of one transformer class."""

    transformer_class: str
    families: str
    attention: str
    mlp: str
    text_columns: str
    guidance: str


class ModelList(Result):
    """All classes with an adapter, and why each other class of diffusers is refused."""

    kind: Literal["models"] = "models"
    models: Sequence[ModelRow]
    pipelines: str = PIPELINES
    others: str = OTHERS
    other_classes: Mapping[str, str]

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return one block of facts for each transformer class."""
        rows = [
            pair
            for model in self.models
            for pair in (
                (model.transformer_class, model.families),
                ("  attention", model.attention),
                ("  MLP", model.mlp),
                ("  text columns", model.text_columns),
                ("  guidance", model.guidance),
                ("", " "),
            )
        ]
        rows += [("pipelines", self.pipelines), ("other classes", self.others), ("", " ")]
        return [Section("", [Facts([*rows, *self.other_classes.items()])])]


def list_models() -> ModelList:
    """Return the models that the installed diffusers has."""
    return ModelList(
        models=[_row(adapter) for name, adapter in ADAPTERS.items() if hasattr(diffusers, name)],
        other_classes={name: f"refused: {reason}" for name, reason in OTHER_CLASSES.items()},
    )


def _row(adapter: type[ModelAdapter]) -> ModelRow:
    parts: dict[Part, str] = {"attention": adapter.sparse_attention, "mlp": adapter.sparse_mlp}
    dense = {part: f"dense: {reason}" for part, reason in adapter.masked_parts.items()}
    # Where the text stands does not depend on the size, which all models can make.
    config = default_arguments(getattr(diffusers, adapter.transformer_class))
    layout = adapter.planned_layout(config, latents=(4, 64, 64), text_tokens=64)
    columns = "none in self-attention"
    if layout.text_tokens:
        columns = f"{'before' if layout.text_first else 'behind'} the image's"
        columns += "" if "attention" in dense else ", always kept"
        columns += "; their rows are exact" if layout.exact_text else ""
    guidance = "none; it is distilled into the model"
    if adapter.guidance_argument is not None:
        in_batch = "in the same call, as the other half of the batch"
        call = in_batch if adapter.guides_in_batch else "a second call per step"
        guidance = f"{adapter.guidance_argument}: {call}"
    return ModelRow(
        transformer_class=adapter.transformer_class,
        families=adapter.families,
        text_columns=columns,
        guidance=guidance,
        **{**parts, **dense},
    )
