"""`chipsparse models`: which models can run sparse, and what of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chipsparse.cli.options import PrintOptions
from chipsparse.cli.results import tell

if TYPE_CHECKING:
    from rich.console import Console

    from chipsparse.config import Part
    from chipsparse.pipelines.adapter import ModelAdapter

# Any size that all models can make; only where its text stands is looked at.
LATENTS = (4, 64, 64)
TEXT_TOKENS = 64
PIPELINES = (
    "plain and modular ones of diffusers; a modular one calls the transformer once for each branch "
    "of its guider"
)
OTHERS = "refused; of those that diffusers has, each with its reason:"


def models(options: PrintOptions) -> None:
    """List the models that can run sparse, and what of each."""
    # Imported here so that --help does not wait for torch and diffusers.
    import diffusers

    import chipsparse
    from chipsparse.cli.model.description import quiet_libraries
    from chipsparse.pipelines.registry import ADAPTERS

    with quiet_libraries(debug=options.debug):
        rows = [
            describe(adapter)
            for name, adapter in ADAPTERS.items()
            if hasattr(diffusers, name)  # older releases lack some
        ]
    content = {
        "chipsparse": chipsparse.__version__,
        "models": rows,
        "pipelines": PIPELINES,
        "others": OTHERS,
        "other_classes": other_classes(),
    }
    tell(content, print_models, as_json=options.json)


def describe(adapter: type[ModelAdapter]) -> dict[str, Any]:
    """What there is to say of the models of one transformer class."""
    return {
        "transformer_class": adapter.transformer_class,
        "families": adapter.families,
        "attention": _part(adapter, "attention", adapter.sparse_attention),
        "mlp": _part(adapter, "mlp", adapter.sparse_mlp),
        "text_columns": _text_columns(adapter),
        "guidance": _guidance(adapter),
    }


def _part(adapter: type[ModelAdapter], part: Part, sparse: str) -> str:
    reason = adapter.masked_parts.get(part)
    return sparse if reason is None else f"dense: {reason}"


def _text_columns(adapter: type[ModelAdapter]) -> str:
    """Where the text stands in a call of the transformer that its class makes by default."""
    import diffusers

    from chipsparse.cli.model.description import default_arguments

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


def other_classes() -> dict[str, str]:
    """Why each of diffusers' transformer classes without an adapter is refused, by its name."""
    from chipsparse.pipelines.other_classes import OTHER_CLASSES

    return {name: f"refused: {reason}" for name, reason in OTHER_CLASSES.items()}


def print_models(content: dict[str, Any], console: Console) -> None:
    """A paragraph for each class with an adapter, one for all others, and a line for each."""
    from chipsparse.cli.tables import Facts, print_facts

    facts: Facts = []
    for row in content["models"]:
        facts += [
            (row["transformer_class"], row["families"]),
            ("  attention", row["attention"]),
            ("  MLP", row["mlp"]),
            ("  text columns", row["text_columns"]),
            ("  guidance", row["guidance"]),
            ("", ""),
        ]
    facts.append(("pipelines", content["pipelines"]))
    facts += [("other classes", content["others"]), ("", "")]
    facts += content["other_classes"].items()
    print_facts(console, facts)
