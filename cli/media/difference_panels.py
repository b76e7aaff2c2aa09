"""A reference, clips beside it, and heat-maps of where they differ from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chipsparse.cli.media.heat_map import choose_factor, difference, heat_map, label
from chipsparse.cli.media.panels import Panel

Named = tuple[np.ndarray, str]  # uint8 `[F, H, W, 3]`, and its label


def difference_rows(
    reference: Named, others: Sequence[Named], *, factor: int | None, in_one_row: bool = False
) -> tuple[list[list[Panel | None]], int]:
    """Panels of the clips, and of their absolute difference from the reference.

    Args:
        reference: what the others are compared with.
        others: at least one, of its shape.
        factor: by how much differences are amplified; None chooses one for all.
        in_one_row: heat-maps stand behind the clips, not each under its own.

    Returns:
        The rows, and the factor that was used.
    """
    differences = [difference(reference[0], frames) for frames, _ in others]
    used = factor or choose_factor(differences)
    clips: list[Panel | None] = [Panel(*reference), *(Panel(*other) for other in others)]
    maps: list[Panel | None] = [Panel(heat_map(each, used), label(used)) for each in differences]
    return ([[*clips, *maps]] if in_one_row else [clips, [None, *maps]]), used
