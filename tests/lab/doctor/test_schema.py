"""docs/doctor.md says what `--json` has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import Struct

from pilotfish.lab.doctor.examination import EXIT_CODES, Examination
from pilotfish.lab.doctor.facts import Disk, MachineFacts, Unit
from pilotfish.lab.doctor.finding import SEVERITIES, Finding
from pilotfish.lab.doctor.outlook import Expects, ProviderOutlook

TEXT = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text("utf-8")


def fields(heading: str) -> list[str]:
    """Return the first column of the table below a heading."""
    section = TEXT.partition(f"\n{heading}\n")[2]
    section = re.split(r"\n#", section)[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "struct"),
    [
        ("## JSON", Examination),
        ("### `findings`", Finding),
        ("### `expects`", Expects),
        ("### `machine`", MachineFacts),
    ],
)
def test_the_tables_are_the_structures(heading: str, struct: type[Struct]) -> None:
    assert fields(heading) == list(struct.__struct_fields__)


@pytest.mark.parametrize("struct", [Disk, Unit, ProviderOutlook])
def test_the_objects_in_lists_are_described(struct: type[Struct]) -> None:
    for name in struct.__struct_fields__:
        assert f"`{name}`" in TEXT


def test_exit_codes_and_severities_are_in_the_document() -> None:
    for severity in SEVERITIES:
        assert f"| `{severity}` |" in TEXT
        assert f"| {EXIT_CODES[severity]} |" in TEXT
