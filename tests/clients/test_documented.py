"""docs/clients.md: what can be run is run, and other programs' settings name what is served."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import CLIENTS, skip_without
from tests.clients.documented import ADDRESS, Block, blocks
from tests.support import web
from tests.support.serving import Serving

APART = ("LiteLLM", "lm-eval")  # their own tests run these
RUNTIMES = {"python": ".py", "js": ".mjs", "sh": ".sh"}
RUN = [each for each in blocks() if each.language in RUNTIMES and each.heading not in APART]
SETTINGS = [each for each in blocks() if each.language not in RUNTIMES]


def name(block: Block) -> str:
    return f"{block.heading}, {block.language}"


@pytest.mark.parametrize("block", RUN, ids=name)
def test_a_documented_block_runs(
    block: Block, service: Serving, run: Callable[..., str], tmp_path: Path
) -> None:
    suffix = RUNTIMES[block.language]
    if suffix != ".sh":
        skip_without(suffix)
    program = (tmp_path / "block").with_suffix(suffix)
    program.write_text(block.at(service.url))
    runtimes = {".py": CLIENTS / "bin" / "python", ".mjs": "node", ".sh": "sh"}
    assert run(runtimes[suffix], program).strip()


@pytest.mark.parametrize("block", SETTINGS, ids=name)
def test_settings_name_what_is_served(block: Block, service: Serving) -> None:
    urls = re.findall(r"http://[\w.:/]+", block.text)
    assert urls
    for url in urls:
        assert url.startswith(ADDRESS)
        # Zed, Codex and others append paths to an address that ends in /v1
        base = url.replace(ADDRESS, service.url)
        answer = web.get(f"{base}/models", timeout=30)
        assert answer.status_code == 200
        assert {each["id"] for each in answer.json()["data"]} == {"pilotfish"}
    assert re.search(r"\bpilotfish\b", block.text)
    if block.language == "json":
        json.loads(block.text)


def test_every_client_has_at_most_a_few_lines() -> None:
    assert RUN
    assert SETTINGS
    for block in blocks():
        assert len(block.text.splitlines()) <= 14, name(block)
