"""The recording of a terminal reads control sequences that come in parts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_control_sequence_in_parts_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    from _terminal import Recording

    output = b"a\x1b[1;35mb\x1b[0m\x1b[?25lc\x1b[>4;1md\x1b]0;title\x07ef"
    for at in range(len(output) + 1):
        recording = Recording()
        recording.write(0.0, output[:at])
        recording.write(1.0, output[at:])
        assert recording.text() == "abcdef", at
        styles = [cell.style for cell in recording.lines[0].values()]
        assert styles[1] == {"bold", "magenta"}, at
        assert styles[2] == frozenset(), at
