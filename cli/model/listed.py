"""The result of `chipsparse models`: which models can run sparse, and what of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import diffusers

from chipsparse.cli.model.description import default_arguments
from chipsparse.cli.views.sections import Facts, Record, Result, Section
from chipsparse.config import Part
from chipsparse.pipelines.family_facts import FamilyFacts
from chipsparse.pipelines.registry import FAMILIES, OTHER_CLASSES

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
    """All classes with a family, and why each other class of diffusers is refused."""

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
        models=[_row(family) for name, family in FAMILIES.items() if hasattr(diffusers, name)],
        other_classes={name: f"refused: {reason}" for name, reason in OTHER_CLASSES.items()},
    )


def _row(family: FamilyFacts) -> ModelRow:
    parts: dict[Part, str] = {"attention": family.sparse.attention, "mlp": family.sparse.mlp}
    dense = {part: f"dense: {reason}" for part, reason in family.sparse.masked.items()}
    # Where the text stands does not depend on the size, which all models can make.
    config = default_arguments(getattr(diffusers, family.transformer_class))
    layout = family.planned_layout(config, latents=(4, 64, 64), text_tokens=64)
    columns = "none in self-attention"
    if layout.text_tokens:
        columns = f"{'before' if layout.text_first else 'behind'} the image's"
        columns += "" if "attention" in dense else ", always kept"
        columns += "; their rows are exact" if layout.exact_text else ""
    guidance = "none; it is distilled into the model"
    if family.guidance.argument is not None:
        in_batch = "in the same call, as the other half of the batch"
        call = in_batch if family.guidance.in_batch else "a second call per step"
        guidance = f"{family.guidance.argument}: {call}"
    return ModelRow(
        transformer_class=family.transformer_class,
        families=family.title,
        text_columns=columns,
        guidance=guidance,
        **{**parts, **dense},
    )
