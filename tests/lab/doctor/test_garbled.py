"""Readings may be cut off, garbled or absurd: the doctor still ends with an examination."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.lab.doctor.commands import Output
from pilotfish.lab.doctor.machine import PROBE, Machine, recorded_machine
from tests.lab.doctor.test_cards import RTX
from tests.lab.doctor.test_shown import SHOWN
from tests.support.machines import ORIN_NANO, RECORDINGS, examined, plant

UNIT = "Id=pilotfish-edge.service\nLoadState=loaded\nActiveState=failed\nExecMainStatus=78\n"
FACTS = '{"packages": {"onnxruntime": "1.31.1"}}\n{"doing": "cuda"}\n{"absent": {"cpu": ""}}\n'
OUTPUTS = {line: text for line, text, _ in SHOWN.values()} | {
    "systemctl show --property=Id pilotfish-edge.service": UNIT,
    PROBE: FACTS,
}
FILES = ORIN_NANO | RTX | {
    "sys/class/thermal/thermal_zone0/temp": "51000",
    "sys/class/thermal/thermal_zone0/trip_point_0_type": "passive",
    "sys/class/thermal/thermal_zone0/trip_point_0_temp": "99000",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq": "1000",
    "proc/swaps": "Filename\n/dev/zram0 partition 100 0 5\n",
    "etc/os-release": 'PRETTY_NAME="Ubuntu"\n',
}  # fmt: skip


def garble(text: str, how: int, at: float) -> str:
    """Return a text that was cut off, or whose numbers are words, huge or negative."""
    place = int(at * len(text))
    return (
        text[:place],
        text[place:],
        re.sub(r"\d", "x", text),
        re.sub(r"\d+", "9" * 40, text),
        re.sub(r"\d+", "-1", text),
        re.sub(r"[.:,]", " ", text),
        "\0\ufffd\x1b[31m{[" + text[place:],
        re.sub(r"(\d+)", r"[N/A]\1", text),
    )[how]


GARBLING = (st.integers(0, 7), st.floats(0, 1))


@given(*GARBLING, st.sampled_from([0, 1, None, -11]))
def test_garbled_outputs_are_examined(how: int, at: float, status: int | None) -> None:
    outputs = {line: Output(garble(text, how, at), status) for line, text in OUTPUTS.items()}
    examination = examined(Machine(Path("/nonexistent"), outputs))
    assert msgspec.json.encode(examination)


@given(*GARBLING)
def test_garbled_files_are_examined(
    tmp_path_factory: pytest.TempPathFactory, how: int, at: float
) -> None:
    root = tmp_path_factory.mktemp("root")
    plant(root, {name: garble(text, how, at) for name, text in FILES.items()})
    assert examined(Machine(root, {})).findings is not None


@given(st.sampled_from(sorted(RECORDINGS.glob("*.toml"))), *GARBLING)
def test_garbled_recordings_are_examined(path: Path, how: int, at: float) -> None:
    machine = recorded_machine(path)
    outputs = {
        line: Output(garble(output.text, how, at), output.status)
        for line, output in machine.listed("")
    }
    assert examined(Machine(machine.root, outputs)).exit_code in (0, 1, 3)
