"""A benchmark knows what else its machine did; what its own children do is not that."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BUSY = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: pass"
WORKS = "import time\nwhile time.process_time() < 1: pass"
# A benchmark that waits, or has a child work, and concludes with a goal that is met and one missed.
BENCHMARK = """
import subprocess, sys, time
sys.path.insert(0, {folder!r})
from _common import at_most, conclude, options
from _company import own_s
import os
args = options("a benchmark").parse_args()
before_s = own_s(os.getpid())
if {child!r}:
    subprocess.run([sys.executable, "-c", {child!r}], check=True)
else:
    time.sleep(2)
rows = [{{"what": "own", "cpu_s": own_s(os.getpid()) - before_s}}]
goals = [at_most("kept", 1.0, 2.0), at_most("broken", 2.0, 1.0)]
sys.exit(conclude(args, "a table", ("what", "cpu_s"), rows, goals))
"""


@contextmanager
def busy(seconds: float) -> Iterator[None]:
    """A process that works, and is none of the benchmark's."""
    process = subprocess.Popen([sys.executable, "-c", BUSY.format(seconds)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def run(tmp_path: Path, child: str = "") -> tuple[dict[str, object], str]:
    """What a benchmark wrote as JSON, and what it showed."""
    script = BENCHMARK.format(folder=str(BENCHMARKS), child=child)
    out = tmp_path / "figures.json"
    command = [sys.executable, "-c", script, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(out.read_text()), done.stdout


def test_figures_beside_other_work_are_marked(tmp_path: Path) -> None:
    with busy(30):
        figures, display = run(tmp_path)
    machine = figures["machine"]
    assert isinstance(machine, dict)
    assert machine["beside_other_work"] is True
    # one process alone takes a core, or on a machine that is full, others have it
    assert machine["other_work_during"] > 0.5 / machine["cores"]
    assert machine["other_work_before"] > 0.5 / machine["cores"]
    assert "taken beside other work: " in display
    assert "% of the cores were busy with something else" in display
    assert "MISSED broken, at most 1: 2 (beside other work)" in display
    assert [goal["met"] for goal in figures["goals"]] == [True, False]


def test_the_work_of_children_is_a_benchmarks_own(tmp_path: Path) -> None:
    """Of those that run and of those that have ended; it is not told as another's."""
    alone, _ = run(tmp_path)
    figures, _ = run(tmp_path, WORKS)
    assert alone["rows"][0]["cpu_s"] < 0.5
    own_s = figures["rows"][0]["cpu_s"]
    assert own_s > 0.3
    cores = figures["machine"]["cores"]
    if alone["machine"]["other_work_during"] < 0.05:  # else others' work hides the difference
        assert figures["machine"]["other_work_during"] < 0.5 / cores


def test_a_quiet_machine_is_told_as_one(tmp_path: Path) -> None:
    figures, display = run(tmp_path)
    machine = figures["machine"]
    shares = [machine[name] for name in ("other_work_before", "other_work_during")]
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert machine["beside_other_work"] == (max(shares) >= 0.05)
    assert ("beside other work" in display) == machine["beside_other_work"]
