"""Raw requests are answered as recorded: status, headers and body, of every route and of none.

Where an answer changes on purpose, delete tests/data/http_answers.json and run this test: it
writes the file, whose difference then shows what has changed.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Pair
from tests.support.raw_requests import TABLE, answers
from tests.support.serving import Serving, serving

RECORDED = Path("tests/data/http_answers.json")


def observe(service: Serving) -> dict[str, Any]:
    """All answers by the request's name, and then how the service has counted the requests."""
    icon = service.get("/page/icon.svg").headers["etag"].strip('"')
    waiting = {name: raw for name, raw in TABLE.items() if raw.waits}
    with ThreadPoolExecutor(len(waiting)) as pool:
        later = {
            name: pool.submit(answers, service.port, raw, icon) for name, raw in waiting.items()
        }
        observation: dict[str, Any] = {
            name: answers(service.port, raw, icon)
            for name, raw in TABLE.items()
            if name not in waiting
        }
        observation |= {name: future.result() for name, future in later.items()}
    lines = service.get("/metrics").text.splitlines()
    observation["metrics"] = [
        each for each in lines if each.startswith("pilotfish_http_requests_total")
    ]
    return observation


def test_raw_requests_are_answered_as_recorded(pair: Pair) -> None:
    with serving(pair.draft, None, "--lanes", 1) as service:
        observation = observe(service)
    if not RECORDED.exists():
        rows = (f"{json.dumps(name)}: {json.dumps(observation[name])}" for name in observation)
        RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        pytest.fail(f"{RECORDED} was not there, and is written now")
    recorded = json.loads(RECORDED.read_text())
    assert list(observation) == list(recorded)
    for name, expected in recorded.items():
        assert observation[name] == expected, name
