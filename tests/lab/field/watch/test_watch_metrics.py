"""A watch's metrics: what is counted, what is absent, and what Prometheus says to it."""

from __future__ import annotations

import dataclasses
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from pilotfish.cli import main
from pilotfish.device_runtime.record import Choice, Round
from pilotfish.edge_runtime.metrics_server import MetricsServer
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.field.run_facts import Facts, Model, Start, Watch
from pilotfish.lab.field.token_speed import steady_token_s
from pilotfish.lab.field.watch.clock import Clock, Stamp
from pilotfish.lab.field.watch.listener import WatchRound
from pilotfish.lab.field.watch.watch_metrics import WatchMetrics
from tests.support import made_answers
from tests.support.commands import command
from tests.support.daemons import WAIT_S, check_exposition, exposition, free_port, scrape
from tests.support.made_answers import stream

EDGE = "tcp://edge:7077"
FACTS = Facts(
    software="pilotfish",
    settings=MatrixSettings(prompts=("a",), protocols=("stream", "ahead", "auto")),
    starts=(Start(unix_s=0.0, host={}, clock_s=0.0, boot_id="", boot_s=0.0),),
    drafter=Model("text"),
    target=None,
    edge=EDGE,
    edge_software=None,
    draft_path="text",
    keys_path=None,
    note="",
    energy=None,
    device="board",
    watch=Watch(every_s=300.0),
)
OUTAGE = Outage(began_unix_s=50.0, began_clock_s=5.0, reason="lost")
START = Stamp(1.0, 1.0)
PROBE = Probe(
    began_unix_s=1.0,
    clock_s=1.0,
    took_s=2.0,
    rtts_s=[0.01 * number for number in range(1, 10)],
    lost=1,
    up_bps=8e6,
    up_bound=True,
    down_bps=16e6,
    uplink_bytes=1000,
    downlink_bytes=2000,
    signal={"source": "wlan0", "dbm": -61.0},
    power_w=4.5,
)


def answer(protocol: str, rounds: list[Round] | None = None, **changes: object) -> Answer:
    """A finished answer of eight tokens in two seconds, of which the prompt takes a quarter."""
    values = {"first_token_s": 0.5, **changes}
    return made_answers.answer(rounds or stream(0.5, 0.5, 0.4, 0.6), protocol=protocol, **values)


def choice(protocol: str) -> Choice:
    return Choice(policy="predictive", protocol=protocol, window=4, token_s=None, reason="")


class SetClock(Clock):
    """Clocks that stand still until the test sets them."""

    wall_s = since_boot_s = 0.0

    def unix_s(self) -> float:
        return self.wall_s

    def boot_s(self) -> float:
        return self.since_boot_s


def full_watch() -> WatchMetrics:
    """Metrics with every series that there is."""
    metrics = WatchMetrics(EDGE, FACTS, SetClock())
    metrics.on_probe(PROBE)
    metrics.on_answer(answer("stream", energy_j=3.0))
    metrics.on_answer(answer("auto", choice=choice("ahead")))
    round_ = WatchRound(number=0, stamp=START, probe=PROBE, failed={"ahead": "no"})
    metrics.on_round(round_)
    metrics.on_outage(OUTAGE)
    metrics.on_outage(dataclasses.replace(OUTAGE, ended_unix_s=80.0, ended_clock_s=35.0))
    metrics.on_clock_step(START, 3600.0)
    metrics.on_disk(START, "full", 3)
    metrics.on_rows(written=12, failures=4, dropped=2, file_bytes=65536)
    return metrics


def samples(metrics: WatchMetrics) -> dict[str, float]:
    """Every sample by name and labels, without the prefix; promtool accepts all of them."""
    result = {}
    for family in metrics.families():
        for each in family.samples:
            name = each.name.removeprefix("pilotfish_watch_")
            result[",".join([name, *each.labels.values()])] = each.value
    return result


class Collected:
    """Collector of a watch's families, as the metrics server is."""

    def __init__(self, metrics: WatchMetrics) -> None:
        self.collect = metrics.families


def test_promtool_accepts_every_series_that_there_is() -> None:
    for metrics in (full_watch(), WatchMetrics(EDGE, FACTS, SetClock())):
        registry = CollectorRegistry()
        registry.register(Collected(metrics))
        check_exposition(generate_latest(registry).decode())


def test_a_probe_tells_the_link() -> None:
    result = samples(full_watch())
    assert result["probe_rtt_median_seconds"] == pytest.approx(0.05)
    assert result["probe_rtt_p90_seconds"] == pytest.approx(0.082)
    assert result["probe_lost_ratio"] == pytest.approx(0.1)
    assert (result["lost_pings_total"], result["rtt_seconds_count"]) == (1, 9)
    assert result["rtt_seconds_bucket,0.05"] == 5
    assert (result["goodput_up_bytes_per_second"], result["goodput_up_bound"]) == (1e6, 1)
    assert (result["goodput_down_bytes_per_second"], result["goodput_down_bound"]) == (2e6, 0)
    assert (result["probe_bytes_total,up"], result["probe_bytes_total,down"]) == (1000, 2000)
    assert (result["signal_dbm"], result["power_watts"]) == (-61.0, 4.5)
    assert result["last_success_age_seconds"] == 0


def test_answers_are_told_by_protocol() -> None:
    result = samples(full_watch())
    assert result["token_seconds,stream"] == 0.25
    assert result["first_token_seconds,auto"] == 0.5
    assert [result[f"answers_total,{name}"] for name in ("stream", "ahead", "auto")] == [1, 0, 1]
    assert result["failed_answers_total,ahead"] == 1
    assert result["choices_total,ahead"] == 1
    assert result["answer_energy_joules_total,stream"] == 3.0
    assert result["rounds_total"] == 1


def test_the_time_per_token_is_that_of_the_report() -> None:
    metrics = WatchMetrics(EDGE, FACTS, SetClock())
    slow_prompt = answer("stream", stream(10.0, 0.5, 0.4, 0.6))
    metrics.on_answer(slow_prompt)
    assert samples(metrics)["token_seconds,stream"] == steady_token_s(slow_prompt) == 0.25
    metrics.on_answer(answer("stream", stream(0.5)))
    assert "token_seconds,stream" not in samples(metrics)  # the newest answer has no steady tokens


def test_what_was_not_measured_is_absent() -> None:
    metrics = WatchMetrics(EDGE, FACTS, SetClock())
    before = samples(metrics)
    metrics.on_probe(Probe(began_unix_s=1.0, clock_s=1.0, took_s=2.0, lost=10))
    after = samples(metrics)
    assert not any(
        name.startswith(("probe_rtt", "last_success", "goodput", "file")) for name in before
    )
    assert before["build_info,pilotfish 0.2.0,board,tcp://edge:7077"] == 1
    assert before["interval_seconds"] == 300.0
    assert after["probe_lost_ratio"] == 1.0
    assert not any(name.startswith(("probe_rtt", "goodput", "signal", "power")) for name in after)


def test_an_outage_counts_by_the_runs_clock() -> None:
    clock = SetClock()
    metrics = WatchMetrics(EDGE, FACTS, clock)
    clock.since_boot_s = 7.0
    assert samples(metrics)["away_seconds_total"] == 0
    metrics.on_outage(OUTAGE)
    assert samples(metrics)["away_seconds_total"] == 2.0  # it began at 5 s
    clock.since_boot_s, clock.wall_s = 30.0, -1e9  # the machine slept, and its clock was set
    later = samples(metrics)
    assert (later["away"], later["outages_total"]) == (1, 1)
    assert later["away_seconds_total"] == 25.0
    metrics.on_outage(dataclasses.replace(OUTAGE, ended_unix_s=9.0, ended_clock_s=35.0))
    ended = samples(metrics)
    assert (ended["away"], ended["away_seconds_total"], ended["outages_total"]) == (0, 30.0, 1)


def test_the_age_of_the_newest_row_is_of_those_in_the_file() -> None:
    clock = SetClock()
    metrics = WatchMetrics(EDGE, FACTS, clock)

    def age_at(since_boot_s: float, wall_s: float = 0.0) -> float:
        clock.since_boot_s, clock.wall_s = since_boot_s, wall_s
        return samples(metrics)["last_row_age_seconds"]

    assert age_at(10.0) == 10.0  # a watch that hangs before its first row has an age, too
    metrics.on_probe(PROBE)
    assert age_at(30.0, wall_s=1e9) == 20.0
    metrics.on_disk(START, "full", 1)
    metrics.on_answer(answer("stream"))
    assert age_at(60.0) == 50.0  # the answer waits in memory
    assert samples(metrics)["last_success_age_seconds"] == 30.0
    metrics.on_disk(START, "", 0)
    assert age_at(70.0) == 40.0
    metrics.on_outage(OUTAGE)
    assert age_at(70.0) == 0.0


def test_a_reader_that_stops_half_way_does_not_hold_the_watch() -> None:
    metrics = full_watch()
    half_read = iter(metrics.families())
    next(half_read)
    watching = threading.Thread(target=metrics.on_answer, args=[answer("stream")], daemon=True)
    watching.start()
    watching.join(10.0)
    assert not watching.is_alive()


def test_the_disk_is_told() -> None:
    metrics = full_watch()
    result = samples(metrics)
    assert (result["disk_failing"], result["disk_errors_total"]) == (1, 4)
    assert (result["rows_total"], result["dropped_rows_total"]) == (12, 2)
    assert result["file_bytes"] == 65536
    metrics.on_disk(START, "", 0)
    assert samples(metrics)["disk_failing"] == 0


def test_foreign_protocols_do_not_grow_the_metrics() -> None:
    metrics = full_watch()
    for number in range(100):
        metrics.on_answer(answer("auto", choice=choice(f"protocol {number}")))
    assert samples(metrics)["choices_total,other"] == 100


@pytest.mark.parametrize(
    "name", ['a "b" \\ {c="d"} 1\n# HELP e', "\x00\x1b[31m\u202e", "ü\ufffd", "m" * 1_000_000]
)
def test_any_name_of_a_device_is_one_short_label(name: str) -> None:
    metrics = WatchMetrics(EDGE, dataclasses.replace(FACTS, device=name), SetClock())
    with closing(MetricsServer("127.0.0.1", 0)) as server:
        server.serve(metrics.families)
        text = exposition(int(server.address.rpartition(":")[2]))
    check_exposition(text)
    assert len(text) < 20_000
    (line,) = (each for each in text.splitlines() if each.startswith("pilotfish_watch_build_info"))
    assert line.isprintable()


def test_scrapers_that_do_not_read_stop_neither_the_watch_nor_other_scrapers() -> None:
    metrics = full_watch()
    with closing(MetricsServer("127.0.0.1", 0)) as server, ExitStack() as stack:
        server.serve(metrics.families)
        port = int(server.address.rpartition(":")[2])
        for _ in range(200):
            scraper = socket.create_connection(("127.0.0.1", port), 10.0)
            stack.callback(scraper.close)
            with suppress(OSError):  # the server may have closed it to make room
                scraper.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        counts = []
        for number in range(20):
            for _ in range(50):
                metrics.on_answer(answer("stream"))
            counts.append(scrape(port)['pilotfish_watch_answers_total{protocol="stream"}'])
            assert counts[-1] == 1 + 50 * (number + 1)


def test_a_watch_without_its_edge_serves_that_it_is_away(tmp_path: Path) -> None:
    port = free_port()
    words = ("field", "watch", "--edge", f"tcp://127.0.0.1:{free_port()}", "--every", "1s")
    words += ("--metrics", port, "--metrics-host", "watch.lan", "--out", tmp_path / "run.pilotfish")
    process = subprocess.Popen(command(*words), stderr=subprocess.DEVNULL)
    try:
        end_s = time.monotonic() + WAIT_S
        while True:
            with suppress(OSError):
                result = scrape(port)
                if result.get("pilotfish_watch_away") == 1:
                    break
            assert time.monotonic() < end_s
            time.sleep(0.1)
        assert result["pilotfish_watch_outages_total"] == 1
        assert result["process_resident_memory_bytes"] > 1e6
        check_exposition(exposition(port))
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_host_needs_a_port(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["field", "watch", "--edge", EDGE, "--out", str(tmp_path / "a"), "--metrics-host", "a"]
    assert main(words) == 78
    assert "together with --metrics" in capsys.readouterr().err
