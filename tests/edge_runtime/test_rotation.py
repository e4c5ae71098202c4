"""The edge's key is replaced while answers run: none is lost, and none differs."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from pilotfish import Device
from pilotfish.edge_runtime import key_rotation
from pilotfish.edge_runtime.key_rotation import KeyRotation
from pilotfish.wire import keys, rotation
from pilotfish.wire import messages as m
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.transport import Listener
from tests.conftest import Pair
from tests.support.daemons import (
    Systemd,
    await_sample,
    free_port,
    reload_as_systemd,
    running,
    scrape,
)
from tests.support.hostile import RawClient

PROMPT = [1, 3, 2, 7]
DEVICES, ANSWERS = 4, 25
WISH = {"protocol": "greedy", "max_tokens": 60}


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    return Systemd(tmp_path)


class Fleet:
    """Devices with folders of their own, each of which answers again and again."""

    def __init__(self, pair: Pair, endpoint: str, edge_keys: Path, folder: Path) -> None:
        self.folders = []
        for number in range(DEVICES):
            ours = folder / f"device-{number}"
            keys.allow(edge_keys, keys.create(ours, keys.DEVICE), f"device-{number}")
            self.folders.append(ours)
        self._pair, self._endpoint, self._edge_keys = pair, endpoint, edge_keys
        self.answers: list[list[int]] = []

    def connect(self) -> None:
        """Let each device begin; the edge has read its list."""
        self._give_edge_pub(self.folders)
        self.devices = [
            Device(self._pair.draft, self._endpoint, folder, threads=1, on_link_loss="fail")
            for folder in self.folders
        ]

    def _give_edge_pub(self, folders: list[Path]) -> None:
        for folder in folders:
            shutil.copy(self._edge_keys / "edge.pub", folder / "edge.pub")

    def run(self, device: Device) -> None:
        for _ in range(ANSWERS):
            self.answers.append(device.generate(PROMPT, **WISH).tokens)

    def give_new_key(self, number: int) -> None:
        """As a device's reload does, in the middle of an answer."""
        self._give_edge_pub([self.folders[number]])
        self.devices[number].redirect(self._endpoint, self.folders[number])

    def await_answers(self, more: int) -> None:
        wanted = min(len(self.answers) + more, DEVICES * ANSWERS)
        while len(self.answers) < wanted:
            time.sleep(0.005)

    def close(self) -> None:
        for device in self.devices:
            device.close()


def test_no_answer_of_a_hundred_is_lost(
    long_pair: Pair, key_folders: dict[str, Path], systemd: Systemd, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(key_folders["edge"], tmp_path / "keys"))
    port = free_port()
    flags = ("--target", long_pair.target, "--keys", folder, "--threads", 1, "--metrics", port)
    with running(*flags, systemd=systemd) as daemon:
        fleet = Fleet(long_pair, daemon.endpoint, folder, tmp_path)
        reload_as_systemd(systemd, daemon.pid)
        fleet.connect()
        wanted = fleet.devices[0].generate(PROMPT, **WISH).tokens

        def steps() -> None:
            fleet.await_answers(8)
            rotation.begin(folder)
            assert reload_as_systemd(systemd, daemon.pid).returncode == 0
            systemd.await_("STATUS", "serving", len(systemd.received) - 1)
            for number in range(DEVICES):
                fleet.await_answers(8)
                fleet.give_new_key(number)
            fleet.await_answers(8)
            assert scrape(port)["former_key_devices"] == 0
            rotation.finish(folder)
            assert reload_as_systemd(systemd, daemon.pid).returncode == 0

        with ThreadPoolExecutor(DEVICES + 1) as pool:
            rotating = pool.submit(steps)
            for done in [pool.submit(fleet.run, device) for device in fleet.devices]:
                done.result()
            rotating.result()
        fleet.close()
        assert fleet.answers == [wanted] * (DEVICES * ANSWERS)


def test_who_still_has_the_former_key_is_known(
    pair: Pair, key_folders: dict[str, Path], systemd: Systemd, tmp_path: Path
) -> None:
    """During the overlap it comes in, also after a restart of the edge; afterwards it is out."""
    folder = Path(shutil.copytree(key_folders["edge"], tmp_path / "keys"))
    port = free_port()
    flags = ("--target", pair.target, "--keys", folder, "--threads", 1, "--metrics", port)
    bob = DeviceKeys.load(key_folders["bob"])
    rotation.begin(folder)
    new = DeviceKeys(bob.secret, bob.public, keys.read_public(folder / "edge.pub"))
    with running(*flags, systemd=systemd) as daemon:
        for held, previous in ((bob, 1), (new, 0), (bob, 1)):
            with RawClient(daemon.endpoint, held) as client:
                client.say(m.Ping(nonce=1))
                assert isinstance(client.receive(), m.Pong)
                assert scrape(port)["former_key_devices"] == previous
        systemd.await_("STATUS", "serving")
        rotation.finish(folder)
        assert reload_as_systemd(systemd, daemon.pid).returncode == 0
        daemon.await_line("connected with the former edge.pub: bob")
        with RawClient(daemon.endpoint, new) as client:
            client.say(m.Ping(nonce=1))
            assert isinstance(client.receive(), m.Pong)
        before = scrape(port)['handshakes_refused_total{reason="edge-key"}']
        with RawClient(daemon.endpoint, bob):
            await_sample(port, 'handshakes_refused_total{reason="edge-key"}', before + 2)
            daemon.await_line("another edge.pub than this edge's")


class Answers:
    """Stands in for a listener: the keys that it was asked to answer to, and nobody came."""

    gate = None

    def __init__(self) -> None:
        self.to: list[tuple[bytes, bytes | None]] = []

    def set_secret_keys(self, secret: bytes, former: bytes | None) -> None:
        self.to.append((secret, former))


def reloaded(rotation: KeyRotation, folder: Path, listener: Answers) -> list[str]:
    return rotation.reload(folder, cast("Listener", listener), {})


def test_steps_between_two_reloads_are_taken_up_together_or_named(tmp_path: Path) -> None:
    """Whoever forgets a reload learns of it at the next one, not from the devices."""
    keys.create(tmp_path, keys.EDGE)
    listener, held = Answers(), KeyRotation(keys.EdgeKeys.load(tmp_path))
    first = held.secret
    assert reloaded(held, tmp_path, listener) == []
    rotation.begin(tmp_path)
    assert reloaded(held, tmp_path, listener) == []
    second = held.secret
    rotation.finish(tmp_path)
    rotation.begin(tmp_path)  # a second one; the first one's end was not read
    assert reloaded(held, tmp_path, listener) == []
    third = held.secret
    assert listener.to == [(second, first), (third, second)]
    rotation.finish(tmp_path)
    rotation.begin(tmp_path)
    rotation.finish(tmp_path)  # none of a third one's steps was read
    [fault] = reloaded(held, tmp_path, listener)
    assert "restart" in fault
    assert listener.to[2:] == [(third, None)]


def test_a_rotation_between_two_keys_that_the_edge_never_had_is_not_followed(
    tmp_path: Path,
) -> None:
    """Its devices have the key of before, and would all be shut out."""
    keys.create(tmp_path, keys.EDGE)
    listener, held = Answers(), KeyRotation(keys.EdgeKeys.load(tmp_path))
    rotation.begin(tmp_path)
    rotation.finish(tmp_path)
    rotation.begin(tmp_path)  # only now it reads its folder
    [fault] = reloaded(held, tmp_path, listener)
    assert "restart this edge" in fault
    assert listener.to == []


def test_a_former_key_that_was_not_read_at_the_start_is_taken_up_by_a_reload(
    tmp_path: Path,
) -> None:
    keys.create(tmp_path, keys.EDGE)
    first = keys.EdgeKeys.load(tmp_path).secret
    rotation.begin(tmp_path)
    (tmp_path / "edge.old.key").chmod(0o644)
    listener, held = Answers(), KeyRotation(keys.EdgeKeys.load(tmp_path))
    [fault] = held.start(cast("Listener", listener))
    assert "chmod 600" in fault
    assert "chmod 600" in reloaded(held, tmp_path, listener)[0]
    assert listener.to == []
    (tmp_path / "edge.old.key").chmod(0o600)  # as it says
    assert reloaded(held, tmp_path, listener) == []
    assert listener.to == [(held.secret, first)]


def test_a_rotation_that_a_service_may_not_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between `keys rotate` and the reload its files were made root's alone again."""
    keys.create(tmp_path, keys.EDGE)
    held = KeyRotation(keys.EdgeKeys.load(tmp_path))
    rotation.begin(tmp_path)
    monkeypatch.setattr(key_rotation, "reread_secret", lambda *_: None)
    [fault] = reloaded(held, tmp_path, Answers())
    assert "restart" in fault
    started = KeyRotation(keys.EdgeKeys.load(tmp_path))  # within it, with both keys of systemd's
    assert reloaded(started, tmp_path, Answers()) == []


def test_another_key_without_a_rotation_needs_a_restart(
    pair: Pair, key_folders: dict[str, Path], systemd: Systemd, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(key_folders["edge"], tmp_path / "keys"))
    with running("--target", pair.target, "--keys", folder, systemd=systemd) as daemon:
        keys.create(tmp_path / "other", keys.EDGE)
        shutil.copy(tmp_path / "other" / "edge.key", folder / "edge.key")
        refused = reload_as_systemd(systemd, daemon.pid)
        assert refused.returncode != 0  # the operator takes the new edge.pub to the devices
        assert "restart" in refused.stderr
        daemon.await_line("edge.key has changed without a rotation")
        assert (
            "edge.key has changed"
            in [info["STATUS"] for _, info in systemd.received if "STATUS" in info][-1]
        )
        with RawClient(daemon.endpoint, DeviceKeys.load(key_folders["bob"])) as client:
            client.say(m.Ping(nonce=1))
            assert isinstance(client.receive(), m.Pong)
