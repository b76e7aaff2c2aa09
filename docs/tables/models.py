"""The models that can be patched: the output of ``chipsparse models``, as tables."""

from __future__ import annotations

from chipsparse.cli.model.listed import list_models
from docs.tables.markdown import table

# Phrases of many adapters, and their shorter form: notes below the table say the rest.
SHORTER = {
    "; cross-attention is left": "",
    " of double and single blocks": "",
    " (gated)": "",
    "feed-forward of the ": "",
    "feed-forward of ": "",
    "of all tokens in single ones": "all in single ones",
}


def models() -> str:
    """Return a row for each transformer class: its models and the parts that run sparse."""
    rows = []
    for model in list_models().models:
        argument, colon, calls = model.guidance.partition(": ")
        guidance = f"`{argument}`" if colon else "none"
        attention = model.attention
        mlp = model.mlp
        for phrase, shorter in SHORTER.items():
            attention = attention.replace(phrase, shorter)
            mlp = mlp.replace(phrase, shorter)
        rows.append(
            {
                "class of the transformer": f"`{model.transformer_class}`",
                "models": model.families,
                "attention": attention,
                "MLP": mlp,
                "text columns": model.text_columns.partition(" ")[0],
                "guidance": guidance + (", in the batch" if "same call" in calls else ""),
            },
        )
    return table(rows)


def other_classes() -> str:
    """Return the classes of diffusers without an adapter, by the reason for which."""
    by_reason: dict[str, list[str]] = {}
    for name, line in list_models().other_classes.items():
        by_reason.setdefault(line.removeprefix("refused: "), []).append(f"`{name}`")
    reasons = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return "\n".join(f"- {', '.join(names)}: {reason}." for reason, names in reasons)
