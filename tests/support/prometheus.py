"""The real Prometheus in a process of its own, with rules, and queries of its API."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemons import free_port

_WAIT_S = 60.0


def tool(name: str) -> str:
    """Return the path of prometheus or promtool; skip the test if it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: prometheus)")
    return path


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer; an error of Prometheus raises an AssertionError."""
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it starts
                raise
            raise AssertionError((parameters, json.load(error))) from None

    def values(self, expression: str) -> list[float]:
        """Return the present values of an expression that are numbers."""
        result = [float(each["value"][1]) for each in self.ask("query", query=expression)["result"]]
        return [value for value in result if not math.isnan(value)]

    def until(self, claim: Callable[[], object]) -> None:
        """Wait until something holds; a Prometheus that does not answer yet holds nothing."""
        end_s = time.monotonic() + _WAIT_S
        while True:
            try:
                if claim():
                    return
            except urllib.error.URLError:
                pass
            assert time.monotonic() < end_s, "Prometheus has not result what it should"
            time.sleep(0.2)


@contextmanager
def scraping(folder: Path, jobs: Mapping[str, int], rules: list[Path]) -> Iterator[Prometheus]:
    """Run Prometheus. jobs: name → port on this machine; each is scraped twice a second."""
    program, port = tool("prometheus"), free_port()
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{at}"]}]}
            for name, at in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML, too
    command = [program, f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        prometheus = Prometheus(port)
        prometheus.until(lambda: len(prometheus.values("up == 1")) == len(jobs))
        yield prometheus
    finally:
        process.terminate()
        process.wait(30)
