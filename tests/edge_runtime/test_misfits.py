"""An edge or a worker whose GPU idles says so: its log, its status line and its metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Pair
from tests.support.daemons import Daemon, Systemd, free_port, running, scrape
from tests.support.other_machine import NODES, machine


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine with a card; returns the card's node."""
    for name, value in machine(tmp_path / "machine", NODES["a card"]).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "machine/dev/nvidia0"


def warnings(daemon: Daemon) -> list[str]:
    return [line for line in daemon.lines if "WARNING" in line]


def test_an_edge_whose_gpu_idles(pair: Pair, tmp_path: Path, card: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra `serve`")
    systemd, port = Systemd(tmp_path), free_port()
    where = ("--target", pair.target, "--threads", 1, "--metrics", f"127.0.0.1:{port}")
    with running(*where, systemd=systemd) as daemon:
        assert "the GPU is idle" in systemd.await_("STATUS", "serving")
        assert scrape(port)["gpu_idle"] == 1
    [warning] = warnings(daemon)
    assert str(card) in warning  # which GPU
    assert "cuda: " in warning  # why
    assert "--provider cpu" in warning


def test_an_edge_that_shall_use_the_cpu_is_silent(pair: Pair, card: Path) -> None:
    with running("--target", pair.target, "--threads", 1, "--provider", "cpu") as daemon:
        pass
    assert card.exists()
    assert warnings(daemon) == []


def test_a_worker_whose_gpu_idles(pair: Pair, card: Path) -> None:
    with running("--target", pair.target, "--threads", 1, action="worker") as daemon:
        pass
    [warning] = warnings(daemon)
    assert str(card) in warning
