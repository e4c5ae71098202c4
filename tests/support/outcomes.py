"""A pytest plugin that writes what became of each test: ``-p tests.support.outcomes --outcomes FILE``.

A line of JSON a test: ``{"test": node id, "outcome": "passed" | "failed" | "skipped", "seconds": …}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--outcomes", type=Path, help="a file for the outcomes, a line of JSON each")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to write where a file is named."""
    if (path := config.getoption("--outcomes")) is not None:
        config.pluginmanager.register(Outcomes(path.open("w", encoding="utf-8")))


class Outcomes:
    """Writes a line when a test has ended, with its fixtures."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._outcome, self._seconds = "passed", 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in a phase; the worst of three is the test's outcome."""
        if report.when == "setup":
            self._outcome, self._seconds = "passed", 0.0
        self._seconds += report.duration
        if report.failed:
            self._outcome = "failed"
        elif report.skipped and self._outcome == "passed":
            self._outcome = "skipped"
        if report.when == "teardown":
            row = {"test": report.nodeid, "outcome": self._outcome, "seconds": self._seconds}
            print(json.dumps(row), file=self._file, flush=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported has failed."""
        if report.failed:
            row = {"test": report.nodeid, "outcome": "failed", "seconds": 0.0}
            print(json.dumps(row), file=self._file, flush=True)
