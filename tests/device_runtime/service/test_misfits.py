"""A service whose GPU idles, or whose model exceeds the memory, says so: log, status, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")

from tests.conftest import Pair
from tests.support.other_machine import NODES, ORIN_NANO, machine
from tests.support.serving import Serving, serving
from tests.support.tiny import tiny_artifact


@pytest.fixture(scope="module")
def contrib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact in a form that no GPU runs."""
    return tiny_artifact(tmp_path_factory.mktemp("tiny") / "contrib", dialect="contrib").path


def misfits(service: Serving) -> list[Any]:
    listed: list[Any] = service.get("/status").json()["misfits"]
    return listed


def warnings(service: Serving) -> list[str]:
    return [line for line in service.lines if "WARNING" in line]


def test_an_idle_gpu_is_told_with_its_reason_and_what_mends_it(tmp_path: Path, pair: Pair) -> None:
    orin = machine(tmp_path, NODES["Orin"], tree=ORIN_NANO)
    with serving(pair.draft, None, **orin) as service:
        [misfit] = misfits(service)
        assert misfit["kind"] == "idle-gpu"
        assert service.metric("pilotfish_gpu_idle") == 1
    message = misfit["message"]
    assert f"{tmp_path}/dev/nvgpu/igpu0" in message  # which GPU
    assert "cuda: " in message  # why
    [line] = warnings(service)
    assert message in line


def test_the_command_that_mends_it_names_the_board(tmp_path: Path, contrib: Path) -> None:
    orin = machine(tmp_path, NODES["Orin"], tree=ORIN_NANO)
    with serving(contrib, None, **orin) as service:
        [misfit] = misfits(service)
    assert "`pilotfish export model MODEL --board orin-nano --out DIR`" in misfit["message"]


def test_the_cpu_by_choice_and_a_machine_without_gpu_are_silent(tmp_path: Path, pair: Pair) -> None:
    orin = machine(tmp_path / "orin", NODES["Orin"], tree=ORIN_NANO)
    none = machine(tmp_path / "none", memory_kib=1 << 20)
    for flags, environment in ((("--provider", "cpu"), orin), ((), none)):
        with serving(pair.draft, None, *flags, **environment) as service:
            assert misfits(service) == []
            assert service.metric("pilotfish_gpu_idle") == 0
        assert warnings(service) == []


def test_too_little_memory_is_told_before_the_model_is_loaded(tmp_path: Path, pair: Pair) -> None:
    small = machine(tmp_path, memory_kib=64)
    with serving(pair.draft, None, **small) as service:
        [misfit] = misfits(service)
        assert misfit["kind"] == "too-large"
        assert "does not fit into this machine" in misfit["message"]
    [line] = warnings(service)
    assert misfit["message"] in line
