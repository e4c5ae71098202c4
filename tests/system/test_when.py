"""The picture of what is fastest when, as the script draws it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "when.py"


def test_the_picture_has_the_fields_and_what_was_measured(tmp_path: Path) -> None:
    points = [
        {"rtt_ms": 50, "pass_ms": 33, "best": "ahead", "ratio": 1.45},
        {"rtt_ms": 0, "pass_ms": 130, "best": "rounds", "ratio": 1.77},
        {"rtt_ms": 20, "pass_ms": 25, "best": "stream", "ratio": 1, "panel": 7},  # of no panel
    ]
    (measured := tmp_path / "points.json").write_text(json.dumps(points))
    drawn = tmp_path / "when.svg"
    command = [sys.executable, SCRIPT, "--drafter", "0.7,6,0.5", "--points", measured]
    subprocess.run([*map(str, command), "--out", str(drawn)], check=True)
    picture = drawn.read_text()
    for text in ("stream", "ahead", "rounds", "RTT (ms)", "0.5 after a correction", "1.5 ×"):
        assert text in picture
    assert ">1.45<" in picture
    assert ">1.77<" in picture
    assert ">1.00<" not in picture
    assert len(picture) < 100_000
