"""What a Python caller is promised: names, types, defaults, and errors of one root."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pilotfish
from pilotfish import Auto, Device, EdgeServer, Grammar, PilotfishError, UnsupportedError
from pilotfish.base.errors import from_code
from tests.conftest import Pair
from tests.support.calling import callers

assert callers  # a fixture

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/guide.md")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def lines_of(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def test_every_public_name_is_there() -> None:
    assert {*pilotfish.__all__} <= {*dir(pilotfish)}
    for name in pilotfish.__all__:
        assert getattr(pilotfish, name) is not None
    names: dict[str, Any] = {}
    exec("from pilotfish import *", names)
    assert {*pilotfish.__all__} <= {*names}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", pilotfish.__version__)
    with pytest.raises(AttributeError):
        _ = pilotfish.nothing


def test_all_errors_have_one_root() -> None:
    from pilotfish import deploy, device_runtime, edge_runtime, engines, export, wire

    private = []
    for room in (deploy, device_runtime, edge_runtime, engines, export, wire):
        for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            for kind in vars(importlib.import_module(module.name)).values():
                if isinstance(kind, type) and issubclass(kind, Exception):
                    ours = kind.__module__.startswith("pilotfish.")
                    if ours and not issubclass(kind, PilotfishError):
                        private.append(kind.__name__)
    never_reach_a_caller = {"RefusalError", "_OrphanedError", "_ClosedError", "_TooCostlyError"}
    assert {*private} <= never_reach_a_caller


def test_an_engines_error_does_not_cross_the_wire() -> None:
    for code in ("engine", "template"):
        assert type(from_code(code, "no.")).__name__ == "InternalError"
    assert isinstance(from_code("unsupported", "no."), ValueError)


def test_auto_is_the_default(device: Device) -> None:
    answer = device.generate("abc", temperature=0.5, max_tokens=8)
    assert answer.choice is not None
    greedy = device.generate("abc", max_tokens=8)
    assert greedy.choice is not None
    assert greedy.tokens == device.generate("abc", max_tokens=8, protocol="greedy").tokens


def test_without_an_edge_the_default_is_local(pair: Pair) -> None:
    with Device(pair.draft, threads=1) as alone:
        answer = alone.generate("abc", temperature=0.5, max_tokens=8)
        assert answer.protocol == "local"
        with pytest.raises(UnsupportedError):
            alone.generate("abc", protocol="auto")


def test_wrong_arguments_are_of_both_kinds(device: Device, pair: Pair) -> None:
    calls: list[Callable[[], object]] = [
        partial(device.generate, "abc", **wrong)
        for wrong in (
            {"protocol": "none"}, {"max_tokens": 0}, {"temperature": -1.0}, {"seed": -1},
            {"schema": {"a": object()}}, {"schema": {}, "grammar": Grammar("json", "{}")},
            {"nothing": 1}, {"window": "auto"}, {"tools": [{}]}, {"logit_bias": {-1: 1.0}},
        )
    ]  # fmt: skip
    calls += [
        partial(Auto, among=["none"]), partial(Device, pair.draft, "nowhere"),
        partial(Device, pair.draft, lanes=0), partial(Device, pair.draft, on_link_loss="x"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, PilotfishError)


@pytest.mark.parametrize("page", PAGES)
def test_documented_lines_run(page: str, callers: Pair, capsys: Any) -> None:
    blocks = [block for block in lines_of(page) if "from pilotfish" in block]  # or other libraries
    with EdgeServer(callers.target, threads=1) as edge:
        for block in blocks:
            lines = block.replace('fetch_model("default", "drafter")', repr(str(callers.draft)))
            lines = lines.replace('EdgeServer("default")', f"EdgeServer({str(callers.target)!r})")
            lines = lines.replace('"tcp://edge.example:7077"', repr(edge.endpoint))
            lines = lines.replace('"drafter"', repr(str(callers.draft)))
            exec(lines.replace('"keys"', "None"), {})
    assert blocks
    assert capsys.readouterr().out


@pytest.mark.slow
def test_documented_lines_are_typed(tmp_path: Path) -> None:
    """As a user's own files, which see the installed package and its py.typed."""
    paths = []
    for page in PAGES:
        for at, block in enumerate(lines_of(page)):
            paths.append(tmp_path / f"{page.partition('.')[0].replace('/', '_')}_{at}.py")
            paths[-1].write_text(block)
    assert len(paths) >= 4
    strictly = ["--strict", "--follow-imports=silent", "--config-file="]
    completed = subprocess.run(
        [sys.executable, "-m", "mypy", *strictly, *map(str, paths)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stdout
