"""A pytest plugin that writes what becomes of each test: ``--outcomes FILE``.

A line of JSON each: ``{"collected": [node ids]}``; ``{"started": node id}``; and, when it has
ended, ``{"test": node id, "outcome": "passed", "seconds": 0.1, "markers": ["slow"]}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.support.shards import KINDS


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--outcomes", type=Path, help="a file for the outcomes, a line of JSON each")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to write where a file is named."""
    if (path := config.getoption("--outcomes")) is not None:
        config.pluginmanager.register(Outcomes(path.open("w", encoding="utf-8")))


class Outcomes:
    """Writes a line when a test begins, and one when it has ended, with its fixtures."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._outcome, self._seconds = "passed", 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Name all tests that will run."""
        self._write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Name a test that begins."""
        self._outcome, self._seconds = "passed", 0.0
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in a phase; the worst of three is the test's outcome."""
        self._seconds += report.duration
        if report.failed:
            self._outcome = "failed"
        elif report.skipped and self._outcome == "passed":
            self._outcome = "skipped"
        if report.when == "teardown":
            self._write(
                test=report.nodeid,
                outcome=self._outcome,
                seconds=round(self._seconds, 3),
                markers=[kind for kind in KINDS if kind in report.keywords],
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write of a file that cannot be imported, or skips as a whole."""
        if report.outcome != "passed":
            self._write(test=report.nodeid, outcome=report.outcome, seconds=0.0, markers=[])

    def _write(self, **row: Any) -> None:
        print(json.dumps(row), file=self._file, flush=True)
