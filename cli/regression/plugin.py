"""The pytest plugin: the fixture `media_regression`, its options, and the page of a run.

pytest imports this file in every environment that has chipsparse, so nothing heavy is imported
before a test asks for the fixture, or one has failed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from chipsparse.cli.regression.outcomes import FAILURE, UPDATE, outcome_folder

if TYPE_CHECKING:
    from chipsparse.cli.regression.check import MediaRegression

REPORT = "media-report"
PAGE = "media-regression.html"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of golden files."""
    group = parser.getgroup("media_regression", "images and videos against golden files")
    group.addoption(
        "--update-golden",
        action="store_true",
        help="Write the golden files of media_regression anew; the checks then pass.",
    )
    group.addoption(
        "--golden-dir",
        metavar="DIR",
        help="Folder of the golden files. Default: golden/ beside each test file.",
    )
    group.addoption(
        "--media-report",
        metavar="DIR",
        default=REPORT,
        help=f"Folder for the page of failures and for new golden files. Default: {REPORT}.",
    )


@pytest.fixture
def media_regression(request: pytest.FixtureRequest) -> MediaRegression:
    """Check images and videos against golden files, and sparse generations against dense ones."""
    from chipsparse.cli.regression.check import MediaRegression

    return MediaRegression(request)


def pytest_configure(config: pytest.Config) -> None:
    """Collect what happened in the process that reports, which is no worker of xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config), "chipsparse-media-outcomes")


class Outcomes:
    """What happened to the golden files in a run of pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self.folder = outcome_folder(config)
        self.failures: list[dict[str, object]] = []
        self.updated: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the outcomes of one test."""
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == FAILURE:
                self.failures.append(json.loads(str(value)))
            elif name == UPDATE:
                self.updated.append(str(value))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the page of all failures, and say where it is."""
        if self.failures:
            page = self.folder / PAGE
            from chipsparse.cli.regression.page import write_page

            write_page(page, self.failures)
            terminalreporter.section("media regression")
            for failure in self.failures:
                terminalreporter.line(f"{failure['test']}: {failure['why']}")
            terminalreporter.line(f"page: {page}")
            terminalreporter.line("where the change is meant: pytest --update-golden")
        for file in self.updated:
            terminalreporter.line(f"golden file written: {file}")
