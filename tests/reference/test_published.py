"""Published config.json files, with small sizes, against transformers: parity in each dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reference.published import PUBLISHED, judge, read_entries, run
from tests.support.runnable import runnable

pytestmark = pytest.mark.reference
ENTRIES = read_entries(PUBLISHED)
ACCEPTED = [entry for entry in ENTRIES if not entry["refused"]]
REFUSED = [entry for entry in ENTRIES if entry["refused"]]


@pytest.mark.parametrize("entry", ACCEPTED, ids=[entry["name"] for entry in ACCEPTED])
def test_published_file_equals_transformers(entry: dict[str, Any], tmp_path: Path) -> None:
    result = run(entry, tmp_path, runnable())
    assert result["outcome"] == "parity", result


@pytest.mark.parametrize("entry", REFUSED, ids=[entry["name"] for entry in REFUSED])
def test_small_file_is_refused_as_the_published_one(entry: dict[str, Any], tmp_path: Path) -> None:
    result = run(entry, tmp_path, ())
    assert judge(entry, result) == "rightly", result
