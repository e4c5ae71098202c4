"""CURVE between an edge and its workers: each knows the other's key, or does not talk to it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import TargetLostError
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire import keys
from pilotfish.wire.protocols import SamplingParams
from tests.support.daemons import Systemd, await_sample, free_port, running, scrape
from tests.support.federating import SESSIONS, Cast, Ensemble, worker, write_list

PROMPT = [3, 1, 4, 1, 5]
OPTIONS = {"protocol": "coupled", "temperature": 1.0, "seed": 2, "window": 3, "max_tokens": 40}
LAW = SamplingParams(sampling=Sampling(temperature=1.0), seed=2)
DENIED = "b: it refuses this edge's key: put edge.pub on its allow-list"


class Folders(NamedTuple):
    """Of keys: two workers', their edge's, its device's."""

    a: Path
    b: Path
    edge: Path
    device: Path


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Every process admits the right peers."""
    made = Folders(*(tmp_path / name for name in Folders._fields))
    for folder in (made.a, made.b, made.edge):
        keys.create(folder, keys.EDGE)
    keys.allow(made.edge, keys.create(made.device, keys.DEVICE), "device")
    shutil.copy(made.edge / "edge.pub", made.device / "edge.pub")
    for folder in (made.a, made.b):
        keys.allow(folder, made.edge / "edge.pub", "edge")
    return made


@pytest.fixture
def workers(cast: Cast, folders: Folders) -> Iterator[tuple[EdgeServer, EdgeServer]]:
    with worker(cast.a, keys=folders.a) as item, worker(cast.b, keys=folders.b) as two:
        yield item, two


def listing(
    folders: Folders,
    workers: tuple[EdgeServer, EdgeServer],
    b_key: str = "b/edge.pub",
    **settings: object,
) -> Path:
    """The list, beside the folders of keys that it names."""
    path = folders.edge.parent / "workers.toml"
    lines = [f"{name} = {value!r}" for name, value in ({"kept": 16} | settings).items()]
    for name, each, key in (("a", workers[0], "a/edge.pub"), ("b", workers[1], b_key)):
        lines += ["[[worker]]", f'name = "{name}"', f'address = "{each.endpoint}"']
        lines += [f'key = "{key}"'] if key else []
    path.write_text("\n".join(lines))
    path.chmod(0o644)
    return path


def flags_of(cast: Cast, folders: Folders, path: Path) -> tuple[object, ...]:
    named = ("--target", cast.a, "--federate", path, "--keys", folders.edge)
    return (*named, "--sessions", SESSIONS, "--threads", 1)


def test_all_is_encrypted_and_nothing_else_changes(
    cast: Cast, folders: Folders, workers: tuple[EdgeServer, EdgeServer]
) -> None:
    path = listing(folders, workers)
    with (
        EdgeServer(cast.a, keys=folders.edge, federate=path, sessions=SESSIONS) as edge,
        Device(cast.draft, edge.endpoint, folders.device, threads=1) as device,
    ):
        got = device.generate(PROMPT, **OPTIONS).tokens
        both = Ensemble([cast.a, cast.b], kept=16)
        both.assert_same(PROMPT, LAW, got, both.decode(PROMPT, 40, LAW))


def test_an_edge_that_is_not_listed_says_so_and_comes_in_once_it_is(
    cast: Cast, folders: Folders, workers: tuple[EdgeServer, EdgeServer], tmp_path: Path
) -> None:
    """Without a restart of either."""
    (folders.b / "allowed" / "edge.pub").unlink()
    os.kill(workers[1].pid, signal.SIGHUP)
    systemd = Systemd(tmp_path)
    path = listing(folders, workers, late="drop", late_s=1.0, give_up_s=2.0)
    with running(*flags_of(cast, folders, path), systemd=systemd) as daemon:
        assert systemd.await_("STATUS", "serving").endswith(f"; {DENIED}")
        with Device(cast.draft, daemon.endpoint, folders.device, threads=1) as device:
            alone = Ensemble([cast.a], kept=16).decode(PROMPT, 40, LAW)
            assert device.generate(PROMPT, **OPTIONS).tokens == alone
            keys.allow(folders.b, folders.edge / "edge.pub", "edge")
            since = len(systemd.received)
            os.kill(workers[1].pid, signal.SIGHUP)
            while systemd.await_("STATUS", "serving", since=since).endswith(DENIED):
                since += 1
            both = Ensemble([cast.a, cast.b], kept=16).decode(PROMPT, 40, LAW)
            assert device.generate(PROMPT, **OPTIONS).tokens == both


def test_an_edge_that_is_shown_out_in_mid_answer_waits_to_be_let_in_again(
    cast: Cast, folders: Folders, workers: tuple[EdgeServer, EdgeServer]
) -> None:
    path, port = listing(folders, workers), free_port()
    flags = {"federate": path, "sessions": SESSIONS, "metrics": port, "threads": 1}
    with (
        EdgeServer(cast.a, keys=folders.edge, **flags) as edge,
        Device(cast.draft, edge.endpoint, folders.device, threads=1) as device,
    ):
        wanted = device.generate(PROMPT, **OPTIONS).tokens
        pieces = device.stream(PROMPT, **OPTIONS)
        got = [*next(pieces).tokens]
        (folders.b / "allowed" / "edge.pub").unlink()
        os.kill(workers[1].pid, signal.SIGHUP)
        rest: list[int] = []
        going_on = threading.Thread(
            target=lambda: rest.extend(token for piece in pieces for token in piece.tokens)
        )
        going_on.start()
        await_sample(port, 'node_events_total{event="refused",node="b"}', 1)
        assert scrape(port)['node_up{node="b"}'] == 0
        keys.allow(folders.b, folders.edge / "edge.pub", "edge")
        os.kill(workers[1].pid, signal.SIGHUP)
        going_on.join(30)
        assert [*got, *rest] == wanted


def test_a_worker_with_another_key_is_not_believed(
    cast: Cast, folders: Folders, workers: tuple[EdgeServer, EdgeServer], tmp_path: Path
) -> None:
    systemd = Systemd(tmp_path)
    path = listing(folders, workers, "a/edge.pub", late="drop", late_s=1.0, give_up_s=2.0)
    with running(*flags_of(cast, folders, path), systemd=systemd) as daemon:
        info = systemd.await_("STATUS", "serving")
        assert "b: it does not complete the handshake: check that the key in the list" in info
        with Device(cast.draft, daemon.endpoint, folders.device, threads=1) as device:
            alone = Ensemble([cast.a], kept=16).decode(PROMPT, 40, LAW)
            assert device.generate(PROMPT, **OPTIONS).tokens == alone


def test_a_worker_without_keys_is_not_believed(cast: Cast, folders: Folders) -> None:
    with worker(cast.a, keys=folders.a) as item, worker(cast.b) as two:
        path = listing(folders, (item, two), late="drop", late_s=1.0, give_up_s=2.0)
        with (
            EdgeServer(cast.a, keys=folders.edge, federate=path, sessions=SESSIONS) as edge,
            Device(cast.draft, edge.endpoint, folders.device, threads=1) as device,
        ):
            alone = Ensemble([cast.a], kept=16).decode(PROMPT, 40, LAW)
            assert device.generate(PROMPT, **OPTIONS).tokens == alone


def test_workers_with_keys_do_not_let_an_edge_without_any_in(
    cast: Cast, folders: Folders, tmp_path: Path
) -> None:
    with worker(cast.a, keys=folders.a) as item:
        settings = {"late": "drop", "late_s": 0.5, "give_up_s": 1.0}
        path = write_list(tmp_path / "w.toml", [("a", item.endpoint)], **settings)
        with (
            pytest.raises(TargetLostError, match="may require keys"),
            EdgeServer(cast.a, federate=path, sessions=SESSIONS),
        ):
            pass
