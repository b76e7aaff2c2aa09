"""The models that can be patched: the output of ``chipsparse models``, as tables."""

from __future__ import annotations

from chipsparse.cli.commands import models as command
from chipsparse.pipelines.registry import ADAPTERS
from docs.tables.markdown import code, table

# Phrases of many adapters, and their shorter form: notes below the table say the rest.
SHORTER = {
    "; cross-attention is left": "",
    " of double and single blocks": "",
    " (gated)": "",
    "feed-forward of the ": "",
    "feed-forward of ": "",
    "of all tokens in single ones": "all in single ones",
}
COLUMNS = ("class of the transformer", "models", "attention", "MLP", "text columns", "guidance")


def models() -> str:
    """Return a row for each transformer class: its models and the parts that run sparse."""
    rows = []
    for adapter in ADAPTERS.values():
        facts = command.describe(adapter)
        argument, colon, calls = facts["guidance"].partition(": ")
        guidance = code(argument) if colon else "none"
        guidance += ", in the batch" if "same call" in calls else ""
        place = facts["text_columns"].partition(" ")[0]
        parts = [facts["attention"], facts["mlp"]]
        for phrase, shorter in SHORTER.items():
            parts = [part.replace(phrase, shorter) for part in parts]
        rows.append((code(adapter.transformer_class), facts["families"], *parts, place, guidance))
    return table(COLUMNS, rows)


def other_classes() -> str:
    """Return the classes of diffusers without an adapter, by the reason for which."""
    by_reason: dict[str, list[str]] = {}
    for name, line in command.other_classes().items():
        by_reason.setdefault(line.removeprefix("refused: "), []).append(code(name))
    reasons = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return "\n".join(f"- {', '.join(names)}: {reason}." for reason, names in reasons)
