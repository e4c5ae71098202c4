"""A model's files are looked at while it is served: a wrong one ends that, a whole one says so."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from pilotfish import Device
from pilotfish.base.errors import EdgeLostError, EdgeUnreachableError
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.inspection import PIECE_BYTES, Inspection
from tests.conftest import Pair
from tests.engines.test_artifact import FILES, write
from tests.support import web
from tests.support.daemons import Systemd, await_sample, free_port, running, scrape
from tests.support.serving import eventually, serving

WEIGHTS = "model.onnx.data"
SOON_S = 10.0


def flip(path: Path) -> None:
    """One bit, in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 + 3] ^= 0x40
    path.write_bytes(data)


def damaged(folder: Path, to: Path, name: str = WEIGHTS) -> Path:
    flip(Path(shutil.copytree(folder, to)) / name)
    return to


def open_files(folder: Path) -> list[Path]:
    """Those of the folder that this process holds open."""
    result = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
    return [Path(name) for name in result if Path(name).parent == folder]


def inspected(artifact: Artifact) -> Inspection:
    inspection = Inspection(artifact)
    inspection.start()
    deadline = time.monotonic() + SOON_S
    while not (inspection.passed or inspection.damage):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    inspection.close()
    return inspection


def test_files_that_are_whole_pass(tmp_path: Path) -> None:
    result = inspected(Artifact.open(write(tmp_path / "a")))
    assert result.passed
    assert result.damage == ""


def test_files_that_were_read_are_let_go(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    inspection = Inspection(Artifact.open(folder))
    try:
        assert len(open_files(folder)) == len(FILES)
        inspection.start()
        eventually(lambda: not open_files(folder))
        assert inspection.passed
    finally:
        inspection.close()


@pytest.mark.parametrize("name", FILES)
def test_any_file_that_differs_is_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "a")
    (folder / name).write_bytes(FILES[name][:-1] + b"x")
    result = inspected(Artifact.open(folder))
    assert not result.passed
    assert str(folder / name) in result.damage
    assert "export the model again" in result.damage


def test_another_model_that_takes_the_place_is_not_mistaken_for_damage(tmp_path: Path) -> None:
    """An export replaces the folder; what was loaded is what was there before."""
    artifact = Artifact.open(write(tmp_path / "a"))
    inspection = Inspection(artifact)
    artifact.path.rename(tmp_path / "old")
    (write(tmp_path / "a") / WEIGHTS).write_bytes(b"others")
    inspection.start()
    deadline = time.monotonic() + SOON_S
    while not inspection.passed and time.monotonic() < deadline:
        assert inspection.damage == ""
        time.sleep(0.01)
    inspection.close()
    assert inspection.passed


def test_file_that_goes_before_it_is_opened_is_named(tmp_path: Path) -> None:
    artifact = Artifact.open(write(tmp_path / "a"))
    (artifact.path / WEIGHTS).unlink()
    with pytest.raises(ArtifactError, match=r"model\.onnx\.data"):
        Inspection(artifact)


@pytest.mark.timing
def test_it_takes_a_share_of_a_core_and_ends_at_once_when_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    with (folder / WEIGHTS).open("wb") as file:
        file.truncate(1000 * PIECE_BYTES)
    inspection = Inspection(Artifact.open(folder))
    began_s, used_s = time.monotonic(), time.process_time()
    inspection.start()
    time.sleep(0.3)
    assert time.process_time() - used_s < 0.6 * (time.monotonic() - began_s)
    inspection.close()
    assert time.monotonic() - began_s < 2
    assert not inspection.passed
    assert "inspection" not in {thread.name for thread in threading.enumerate()}


def test_edge_with_a_flipped_bit_ends(pair: Pair, tmp_path: Path) -> None:
    """With the exit code that its unit does not try again, told in one line and to systemd."""
    systemd = Systemd(tmp_path)
    target = damaged(pair.target, tmp_path / "target")
    with running("--target", target, "--threads", 1, systemd=systemd) as daemon:
        assert daemon.ends(SOON_S) == 66
        line = daemon.await_line("the model that is served is damaged")
        assert str(target / WEIGHTS) in line
        assert str(target / WEIGHTS) in systemd.await_("STATUS", str(target))
        assert not any("Traceback" in line for line in daemon.lines)
        refused = (EdgeUnreachableError, EdgeLostError)
        with pytest.raises(refused), Device(pair.draft, daemon.endpoint, threads=1) as device:
            device.generate([3, 1], max_tokens=4, protocol="greedy")


def test_edge_that_is_whole_says_so_and_stays(pair: Pair) -> None:
    port = free_port()
    with running("--target", pair.target, "--threads", 1, "--metrics", port) as daemon:
        assert await_sample(port, "weights_verified", 1.0, SOON_S) == 1.0
        assert scrape(port)["weights_damaged"] == 0.0
        with Device(pair.draft, daemon.endpoint, threads=1) as device:
            assert device.generate([3, 1], max_tokens=4, protocol="greedy").tokens


def test_node_with_a_flipped_bit_ends(pair: Pair, tmp_path: Path) -> None:
    target = damaged(pair.target, tmp_path / "target")
    with running("--target", target, "--threads", 1, action="worker") as daemon:
        assert daemon.ends(SOON_S) == 66
        assert str(target / WEIGHTS) in daemon.await_line("is damaged")


def test_service_with_a_flipped_bit_is_not_ready(pair: Pair, tmp_path: Path) -> None:
    draft = damaged(pair.draft, tmp_path / "draft")
    with serving(draft, None) as service:
        eventually(lambda: any("is damaged" in line for line in service.lines), SOON_S)
        assert str(draft / WEIGHTS) in "".join(service.lines)
        answer = service.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "damaged")
        wanted = {"prompt": [3, 1], "max_tokens": 2}
        refused = web.post(f"{service.url}/v1/completions", json=wanted)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "damaged")
        eventually(lambda: service.metric("pilotfish_weights_damaged") == 1, SOON_S)
        assert service.metric("pilotfish_weights_verified") == 0


def test_service_that_is_whole_stays_ready(pair: Pair) -> None:
    with serving(pair.draft, None) as service:
        eventually(lambda: service.metric("pilotfish_weights_verified") == 1, SOON_S)
        assert service.metric("pilotfish_weights_damaged") == 0
        assert service.get("/health").json()["status"] == "ok"
        wanted = {"prompt": [3, 1], "max_tokens": 2}
        assert web.post(f"{service.url}/v1/completions", json=wanted).status_code == 200
