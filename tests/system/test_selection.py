"""Which slow tests a change calls for: none is left out that it could break."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rooms import room_of
from tests.support.selection import SLOW_ROOMS, changed_rooms, rooms_of
from tests.support.shards import ROOT


@pytest.mark.parametrize(
    ("name", "rooms"),
    [
        ("docs/wire.md", set()),
        ("docs/clients.md", {"clients"}),
        ("tests/clients/programs/ai_sdk.mjs", {"clients"}),
        (
            "pilotfish/device_runtime/service/openai.py",
            {"bridge", "clients", "device_runtime", "system"},
        ),
        ("pilotfish/lab/judge/mining.py", {"judge", "reference"}),
        ("pilotfish/lab/selftest/checks.py", {"selftest"}),
        ("pilotfish/lab/__init__.py", {"distill", "field", "judge", "selftest"}),
        ("tests/lab/field/test_resume.py", {"field"}),
        ("tests/lab/test_runs.py", set()),
        ("tests/deploy/booted/machine.py", {"deploy"}),
        ("tests/deploy/arm64/emulated.py", {"deploy"}),
        ("pilotfish/systemd/pilotfish-edge.service", {"deploy"}),
        ("pilotfish/edge_runtime/loop.py", {"edge_runtime", "system"}),
        ("pilotfish/wire/channel.py", {"device_runtime", "edge_runtime", "system", "wire"}),
        ("pilotfish/base/files.py", set(SLOW_ROOMS)),
        ("tests/support/tiny.py", set(SLOW_ROOMS)),  # of conftest
        ("tests/support/gguf_models.py", {"engines", "export", "system"}),
        ("tests/support/relay.py", {"device_runtime", "edge_runtime", "field", "system", "wire"}),
        ("tests/data/net.json", {"system"}),
        ("tests/engines/test_decoder.py", {"engines"}),  # which test_llamacpp imports
        ("constraints.txt", set(SLOW_ROOMS)),
    ],
)
def test_a_change_calls_for_the_slow_tests_of_its_rooms(name: str, rooms: set[str]) -> None:
    assert rooms_of([name]) == rooms
    assert rooms_of(["README.md", name]) == rooms


def test_without_history_all_are_called_for() -> None:
    assert changed_rooms("no-such-commit") == set(SLOW_ROOMS)


def test_every_room_with_slow_tests_is_known() -> None:
    marked = [p for p in Path(ROOT, "tests").rglob("test_*.py") if "mark.slow" in p.read_text()]
    rooms = {room_of(path.relative_to(ROOT / "tests").as_posix()) for path in marked}
    assert rooms <= set(SLOW_ROOMS)
