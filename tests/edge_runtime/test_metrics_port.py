"""Who is told the edge's figures, and whether devices are named in them."""

from __future__ import annotations

import http.client
from contextlib import closing
from pathlib import Path

import pytest

from pilotfish import Device
from pilotfish.cli import main
from pilotfish.edge_runtime.metrics_server import MetricsServer
from pilotfish.wire.transport import is_own_host
from tests.conftest import Pair
from tests.support.daemons import exposition, free_port, running


def status(port: int, host: str | None) -> int:
    """What a GET is answered with that names this Host, or none."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        connection.putrequest("GET", "/metrics", skip_host=True)
        if host is not None:
            connection.putheader("Host", host)
        connection.endheaders()
        return connection.getresponse().status


@pytest.mark.parametrize(
    "header",
    [
        *("", "localhost", "LocalHost:9464", "localhost.:9464", "127.0.0.1:9464", "127.3.2.1"),
        *("[::1]:9464", "[::1]", "192.168.1.7:9464", "[fe80::1]:80", "[::ffff:10.0.0.1]"),
        *("edge.lan", "EDGE.lan:9464", "edge.lan."),
    ],
)
def test_addresses_and_known_names_are_own(header: str) -> None:
    assert is_own_host(header, {"edge.lan"})


@pytest.mark.parametrize(
    "header",
    [
        *("evil.example", "evil.example:9464", "localhost.evil.example", "127.0.0.1.nip.io"),
        *("edge.lan.evil.example", "notedge.lan", "xn--localhost", "1.2.3", "2130706433", "[::1"),
        *("0x7f.0.0.1", ":9464", "]", "[evil]", "evil@", "127.0.0.1@evil.example", "\u2460"),
    ],
)
def test_names_of_others_are_foreign(header: str) -> None:
    assert not is_own_host(header, {"edge.lan"})


def test_a_foreign_host_is_told_nothing() -> None:
    with closing(MetricsServer("127.0.0.1", 0, ("Edge.Lan",))) as server:
        port = int(server.address.rpartition(":")[2])
        for host in (None, "127.0.0.1", f"localhost:{port}", "10.1.2.3:9464", "edge.lan:9464"):
            assert status(port, host) == 200, host
        for host in ("evil.example", "evil.example:9464", "localhost.evil.example"):
            assert status(port, host) == 403, host


def test_two_hosts_are_no_request() -> None:
    with closing(MetricsServer("127.0.0.1", 0)) as server:
        port = int(server.address.rpartition(":")[2])
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            connection.putrequest("GET", "/metrics", skip_host=True)
            for host in ("evil.example", "localhost"):
                connection.putheader("Host", host)
            connection.endheaders()
            assert connection.getresponse().status == 400


@pytest.mark.parametrize("flag", [("--metrics-host", "a"), ("--metrics-devices",)])
def test_what_goes_with_metrics(flag: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["edge", "serve", "--target", "nowhere", *flag]) == 78
    assert "together with --metrics" in capsys.readouterr().err


@pytest.mark.parametrize("named", [False, True])
def test_an_edge_names_devices_only_if_it_is_asked_to(
    pair: Pair, key_folders: dict[str, Path], named: bool
) -> None:
    port = free_port()
    flags = ("--target", pair.target, "--keys", key_folders["edge"], "--threads", 1)
    flags += ("--metrics", port, "--metrics-host", "edge.lan")
    with running(*flags, *(("--metrics-devices",) if named else ())) as edge:
        with Device(pair.draft, edge.endpoint, key_folders["alice"], threads=1) as device:
            device.generate([1, 2, 3], protocol="greedy", max_tokens=3)
            text = exposition(port)
        assert ("alice" in text) == named
        assert ("pilotfish_edge_device_jobs_total" in text) == named
        assert "pilotfish_edge_windows_total" in text
        assert [status(port, host) for host in ("evil.example:1", "edge.lan:1")] == [403, 200]
