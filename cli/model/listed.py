"""The result of `chipsparse models`: which models can run sparse, and what of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import diffusers

from chipsparse.cli.model.description import default_arguments
from chipsparse.cli.views.sections import Facts, Record, Result, Section
from chipsparse.config import Part
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.other_classes import OTHER_CLASSES
from chipsparse.pipelines.registry import ADAPTERS

# Any size that all models can make; only where its text stands is looked at.
LATENTS = (4, 64, 64)
TEXT_TOKENS = 64
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
        """Return a paragraph for each class with an adapter, and a line for each other one."""
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
    known = [adapter for name, adapter in ADAPTERS.items() if hasattr(diffusers, name)]
    return ModelList(
        models=[
            ModelRow(
                transformer_class=adapter.transformer_class,
                families=adapter.families,
                attention=_part(adapter, "attention", adapter.sparse_attention),
                mlp=_part(adapter, "mlp", adapter.sparse_mlp),
                text_columns=_text_columns(adapter),
                guidance=_guidance(adapter),
            )
            for adapter in known
        ],
        other_classes={name: f"refused: {reason}" for name, reason in OTHER_CLASSES.items()},
    )


def _part(adapter: type[ModelAdapter], part: Part, sparse: str) -> str:
    reason = adapter.masked_parts.get(part)
    return sparse if reason is None else f"dense: {reason}"


def _text_columns(adapter: type[ModelAdapter]) -> str:
    """Return where the text stands in a call of the transformer that its class makes by default."""
    config = default_arguments(getattr(diffusers, adapter.transformer_class))
    layout = adapter.planned_layout(config, latents=LATENTS, text_tokens=TEXT_TOKENS)
    if layout.text_tokens == 0:
        return "none in self-attention"
    place = f"{'before' if layout.text_first else 'behind'} the image's"
    kept = "" if "attention" in adapter.masked_parts else ", always kept"
    return place + kept + ("; their rows are exact" if layout.exact_text else "")


def _guidance(adapter: type[ModelAdapter]) -> str:
    if adapter.guidance_argument is None:
        return "none; it is distilled into the model"
    if getattr(adapter, "guides_in_batch", False):
        return f"{adapter.guidance_argument}: in the same call, as the other half of the batch"
    return f"{adapter.guidance_argument}: a second call per step"
