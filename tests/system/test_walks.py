"""The parts of `tests.support.walks`: what it counts in a small package, and what of messages."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zmq

from pilotfish.wire import messages
from tests.support import source_measures, walks
from tests.support.walk_tracer import LATER, Recorder, RoundMarks, Walk, kind_of

SOURCES = {
    "__init__.py": '"""A package."""\n',
    "edge_runtime/scheduler.py": '''"""A module
of two lines."""

class Job:
    """Work."""

    slots: int  # code

class Scheduler:
    def __init__(self, slots):
        self._held = {}  # code

        # a comment
        self._chains = [0] * slots
        self._text = """a
string"""

    def keep_path(self, slot, path):
        """Keep."""
''',
    "engines/kv.py": (
        "import numpy as np\n\n\nclass Slots:\n    def __init__(self, slots):\n"
        "        self._trees, self.lengths = [(0, 0)] * slots, np.zeros((slots, 4))\n"
        "    def rollback(self, slot, length):\n        pass\n"
    ),
    "lab/field/run.py": "min_p = 1\n",
    "wire/request.py": "text = 'min_p'\nother = 'min_pp'\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        path = tmp_path / "pilotfish" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "pilotfish"


def test_source(package: Path) -> None:
    measured = source_measures.measure(package, ["min_p", "prompt_logprobs"])
    assert measured["options"] == {
        "min_p": ["lab/field/run.py", "wire/request.py"],
        "prompt_logprobs": [],
    }
    assert measured["slot_methods"] == {
        "in engines": ["engines/kv.py:Slots.rollback"],
        "outside engines": ["edge_runtime/scheduler.py:Scheduler.keep_path"],
    }
    assert measured["owners"] == {
        "edge_runtime/scheduler.py:Scheduler": ["_held"],
        "engines/kv.py:Slots": ["_trees"],
    }
    assert "LocalTarget._chains" in measured["missing_owners"]
    assert "Scheduler._held" not in measured["missing_owners"]
    assert measured["per_slot"] == [
        "edge_runtime/scheduler.py:Scheduler._chains",
        "engines/kv.py:Slots.lengths",
    ]
    assert measured["types"]["from job to graph"] == ["Job"]
    assert measured["rooms"] == {
        "all": {"files": 5, "code": 18},
        "edge_runtime": {"files": 1, "code": 9},
        "engines": {"files": 1, "code": 6},
        "wire": {"files": 1, "code": 2},
        "field": {"files": 1, "code": 1},
        "(root)": {"files": 1, "code": 0},
    }


def test_rooms_of_another_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for room in ("edge_runtime", "wire"):
        shutil.copytree(walks.ROOT / "pilotfish" / room, tmp_path / "pilotfish" / room)
    figures = tmp_path / "figures.json"
    words = ["--static", "--json", figures, "--options", "seed", "--checkout", tmp_path]
    walks.main([str(word) for word in words])
    measured = json.loads(figures.read_text())["source"]
    assert measured["options"]["seed"]
    assert "Job" in measured["types"]["from job to graph"]
    assert set(measured["rooms"]) == {"all", "edge_runtime", "wire"}
    assert measured["rooms"]["wire"]["code"] > 1000
    assert "code lines by room" in capsys.readouterr().out


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[dict[str, ModuleType]]:
    """A package of two modules, traced in this process."""
    folder = tmp_path / "walked"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "first.py").write_text(
        "from walked import second\n"
        "def call():\n    second.call()\n    second.call()\n    return [n for n in range(3)]\n"
    )
    (folder / "second.py").write_text("def call():\n    return sum(n for n in range(3))\n")
    sys.path.insert(0, str(tmp_path))
    yield {name: importlib.import_module(f"walked.{name}") for name in ("first", "second")}
    sys.path.remove(str(tmp_path))
    for name in ("walked", "walked.first", "walked.second"):
        del sys.modules[name]


def test_recorder(tmp_path: Path, modules: dict[str, ModuleType]) -> None:
    recorder = Recorder(str(tmp_path / "walked"))
    profile, thread_profile = sys.getprofile(), threading.getprofile()
    try:
        recorder.install()
        modules["second"].call()  # before the walk
        recorder.start("walk")
        modules["first"].call()
        thread = threading.Thread(target=modules["second"].call)
        thread.start()
        thread.join()
        recorder.stop("walk")
        modules["first"].call()  # after it
        recorder.start("dropped")
        recorder.stop("dropped", keep=False)
        recorder.stop("never begun")
    finally:
        sys.setprofile(profile)
        threading.setprofile(thread_profile)
    assert recorder.walks == {
        "walk": [
            {
                "files": ["first.py", "second.py"],
                "functions": ["first.py:call:2", "second.py:call:1"],
                "calls": 4,
                "changes": 3,
            }
        ]
    }


class Steps(Recorder):
    """Notes starts and ends."""

    def __init__(self) -> None:
        super().__init__("")
        self.steps: list[Any] = []

    def start(self, name: str) -> None:
        self.steps.append(f"start {name}")

    def stop(self, name: str, *, keep: bool = True) -> None:
        self.steps.append((name, keep))


def test_marks_of_a_device() -> None:
    steps = Steps()
    marks = RoundMarks(steps)
    marks.start_answer()
    for _ in range(LATER + 2):
        marks.sent("window")
        marks.received("verdict")
    marks.end_answer()
    assert steps.steps[:4] == ["start first draft", ("first draft", True), ("round", False),
                               "start round"]  # fmt: skip
    recorded = [step[1] for step in steps.steps if step[0] == "round"]
    assert recorded == [False] * LATER + [True, True] + [False]


def test_marks_of_an_edge() -> None:
    steps = Steps()
    marks = RoundMarks(steps)
    for _ in range(2):  # the first answer imports modules
        marks.received("begin")
        for _ in range(LATER + 1):
            marks.received("window")
            marks.sent("verdict")
    recorded = [step[1] for step in steps.steps if step[0] == "round"]
    assert recorded == [False] * (LATER + 1) + [False] * LATER + [True]


def test_a_cycle_ends_at_the_next_window() -> None:
    steps = Steps()
    marks = RoundMarks(steps)
    for _ in range(2):
        marks.received("begin")
        for _ in range(LATER + 3):
            marks.received("window")
            marks.sent("verdict")
    recorded = [step[1] for step in steps.steps if step[0] == "cycle"]
    first = [False] * (LATER + 4)  # the first answer, and what its last window began
    assert recorded == [*first, *[False] * (LATER + 2), True, True]


def test_kinds_of_messages() -> None:
    for header in (messages.Ping, messages.Close, messages.Cancel):
        fields = dict.fromkeys(header.__struct_fields__, 0)
        assert kind_of(messages.encode(header(**fields))) == header.__struct_config__.tag
    assert kind_of(zmq.Frame(b"\xdc\x00\x14\xa6window\x00")) == "window"
    for frame in (b"", b"\x91", b"\x91\x05", b"\xdc", bytes(64), bytes(range(256))):
        assert kind_of(frame) == ""
    tags = {each.__struct_config__.tag for each in (messages.Begin, messages.Window)}
    assert tags | {messages.Verdict.__struct_config__.tag} == {"begin", "window", "verdict"}


def test_summary() -> None:
    def walk(*files: str, calls: int) -> Walk:
        return {"files": [*files], "functions": [*files], "calls": calls, "changes": calls}

    repeats = [walk("a", "b", calls=1), walk("a", calls=3), walk("a", "c", calls=9)]
    result = walks.summary(repeats)
    assert result["files"] == {
        "each": 1,
        "median": 2,
        "any": 3,
        "in_each": ["a"],
        "in_some": ["b", "c"],
    }
    assert (result["repeats"], result["calls"]) == (3, 3)
    [joined] = walks.both([repeats[:1], repeats[2:]])
    assert joined == walk("a", "b", "c", calls=10)
