"""Which layers missed a refresh, because a cache of diffusers passed over them at that step."""

from __future__ import annotations

from chipsparse.config import Part
from chipsparse.plan import Action


class MissedRefreshes:
    """Knows of every branch when it was refreshed last, and of its layers when they really were."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets everything: another generation begins."""
        self._branches: dict[str, int] = {}
        self._layers: dict[tuple[str, int, Part], int] = {}

    def begin(self, branch: str, step: int, action: Action) -> None:
        """Notes what a call of a branch does."""
        if action is Action.REFRESH:
            self._branches[branch] = step

    def made(self, branch: str, layer: int, part: Part, step: int) -> None:
        """Notes that a layer was refreshed, in its turn or to catch up."""
        self._layers[branch, layer, part] = step

    def behind(self, branch: str, layer: int, part: Part) -> bool:
        """Whether a layer holds less than what the last refresh of its branch recorded."""
        return self._layers.get((branch, layer, part), -1) < self._branches.get(branch, -1)
