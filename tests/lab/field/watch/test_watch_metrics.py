"""A watch's metrics: what is counted, what is absent, and what Prometheus says to it."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from pilotfish.cli import main
from pilotfish.device_runtime.record import Choice
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.run import Answer, Facts, MatrixSettings, Model, Start, Watch
from pilotfish.lab.field.watch.clock import Stamp
from pilotfish.lab.field.watch.listener import WatchRound
from pilotfish.lab.field.watch.watch_metrics import WatchMetrics
from tests.support.commands import command
from tests.support.daemons import WAIT_S, check_exposition, exposition, free_port, scrape

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


def answer(protocol: str, **changes: object) -> Answer:
    """A finished answer of eight tokens in two seconds."""
    values = {"tokens": 8, "total_s": 2.0, "first_token_s": 0.5, **changes}
    return Answer(
        id=1,
        protocol=protocol,
        window=None,
        prompt=0,
        repeat=0,
        warm_up=False,
        temperature=0.0,
        seed=0,
        started_unix_s=0.0,
        finished=True,
        **values,  # type: ignore[arg-type]  # of several types
    )


def choice(protocol: str) -> Choice:
    return Choice(policy="predictive", protocol=protocol, window=4, token_s=None, reason="")


def full_watch() -> WatchMetrics:
    """Metrics with every series that there is."""
    metrics = WatchMetrics(EDGE, FACTS)
    metrics.on_probe(PROBE)
    metrics.on_answer(answer("stream", energy_j=3.0))
    metrics.on_answer(answer("auto", choice=choice("ahead")))
    round_ = WatchRound(number=0, stamp=Stamp(1.0, 1.0), probe=PROBE, failed={"ahead": "no"})
    metrics.on_round(round_)
    metrics.on_outage(OUTAGE)
    metrics.on_outage(dataclasses.replace(OUTAGE, ended_unix_s=80.0, ended_clock_s=35.0))
    metrics.on_clock_step(Stamp(1.0, 1.0), 3600.0)
    metrics.on_disk("full", 3)
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
    for metrics in (full_watch(), WatchMetrics(EDGE, FACTS)):
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
    assert abs(result["last_success_timestamp_seconds"] - time.time()) < 60


def test_answers_are_told_by_protocol() -> None:
    result = samples(full_watch())
    assert result["token_seconds,stream"] == 0.25
    assert result["first_token_seconds,auto"] == 0.5
    assert [result[f"answers_total,{name}"] for name in ("stream", "ahead", "auto")] == [1, 0, 1]
    assert result["failed_answers_total,ahead"] == 1
    assert result["choices_total,ahead"] == 1
    assert result["answer_energy_joules_total,stream"] == 3.0
    assert result["rounds_total"] == 1


def test_what_was_not_measured_is_absent() -> None:
    metrics = WatchMetrics(EDGE, FACTS)
    before = samples(metrics)
    metrics.on_probe(Probe(began_unix_s=1.0, clock_s=1.0, took_s=2.0, lost=10))
    after = samples(metrics)
    assert not any(name.startswith(("probe_rtt", "last_", "goodput", "file")) for name in before)
    assert before["build_info,pilotfish 0.2.0,board,tcp://edge:7077"] == 1
    assert before["interval_seconds"] == 300.0
    assert after["probe_lost_ratio"] == 1.0
    assert not any(name.startswith(("probe_rtt", "goodput", "signal", "power")) for name in after)


def test_an_outage_counts_while_it_lasts_and_by_the_runs_clock_in_the_end() -> None:
    metrics = WatchMetrics(EDGE, FACTS)
    assert samples(metrics)["away_seconds_total"] == 0
    metrics.on_outage(OUTAGE)
    first = samples(metrics)
    time.sleep(0.01)
    later = samples(metrics)
    assert (later["away"], later["outages_total"]) == (1, 1)
    assert 0 < later["away_seconds_total"] - first["away_seconds_total"] < 10
    metrics.on_outage(dataclasses.replace(OUTAGE, ended_unix_s=9.0, ended_clock_s=35.0))
    ended = samples(metrics)
    assert (ended["away"], ended["away_seconds_total"], ended["outages_total"]) == (0, 30.0, 1)


def test_the_disk_is_told() -> None:
    metrics = full_watch()
    result = samples(metrics)
    assert (result["disk_failing"], result["disk_errors_total"]) == (1, 4)
    assert (result["rows_total"], result["dropped_rows_total"]) == (12, 2)
    assert result["file_bytes"] == 65536
    metrics.on_disk("", 0)
    assert samples(metrics)["disk_failing"] == 0


def test_foreign_protocols_do_not_grow_the_metrics() -> None:
    metrics = full_watch()
    for number in range(100):
        metrics.on_answer(answer("auto", choice=choice(f"protocol {number}")))
    assert samples(metrics)["choices_total,other"] == 100


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
