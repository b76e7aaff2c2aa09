"""What checks tell the plugin of a test, and where both write.

The plugin imports this file in every environment that has chipsparse: nothing here is heavy.
"""

from __future__ import annotations

from pathlib import Path

import pytest

# Names under which reports of tests carry what happened, also from the processes of xdist.
FAILURE = "media_regression_failure"
UPDATE = "media_regression_update"


def outcome_folder(config: pytest.Config) -> Path:
    """Return the folder of the page and of new golden files."""
    return Path(config.invocation_params.dir / config.getoption("--media-report"))
