"""What can be patched: what ``chipsparse models`` prints, as tables."""

from __future__ import annotations

from chipsparse.cli.commands import models as command
from chipsparse.pipelines.registry import ADAPTERS
from chipsparse.profiles.profile import ASSETS
from docs.tables.markdown import code, table


def models() -> str:
    """The transformer classes, their models, and what of them runs sparse."""
    rows = [
        (code(row["transformer_class"]), row["families"], row["attention"], row["mlp"])
        for row in _rows()
    ]
    return table(("class of the transformer", "models", "attention", "MLP"), rows)


def details() -> str:
    """Where the text stands, how guidance is called, and which profile there is."""
    rows = []
    for row in _rows():
        name = row["transformer_class"]
        file = f"profiles/{name}.yaml"
        profile = f"[profile](../assets/{file})" if (ASSETS / file).is_file() else "none"
        argument, colon, calls = row["guidance"].partition(": ")
        guidance = f"{code(argument)}: {calls}" if colon else argument
        rows.append((code(name), row["text_columns"], guidance, profile))
    columns = ("class of the transformer", "text columns", "guidance", "profile")
    return table(columns, rows)


def other_classes() -> str:
    """What becomes of each class of diffusers without an adapter."""
    rows = [(code(name), line) for name, line in command.other_classes().items()]
    return table(("class of the transformer", "what becomes of it"), rows)


def _rows() -> list[dict[str, str]]:
    return [command.describe(adapter) for adapter in ADAPTERS.values()]
