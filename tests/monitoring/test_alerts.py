"""Alerts: Prometheus's own tool reads them, and each fires when it should, and only then."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pilotfish.monitoring.files import monitoring_files
from tests.support.prometheus import tool

ROOT = Path(__file__).parents[2]
INSTANCE = "a:1"
EDGE, DEVICE, WATCH = (
    f'job="pilotfish-{name}",instance="{INSTANCE}"' for name in ("edge", "device", "watch")
)


class Case(NamedTuple):
    """What is scraped, in promtool's notation, and whether the alert fires then.

    A scrape is each minute, or each five minutes if the case takes more than a day.
    """

    alert: str
    fires: bool
    at: str
    series: dict[str, str]


def of(scraped: str, metric: str, **labels: object) -> str:
    """A series in promtool's notation."""
    selector = ",".join([scraped, *(f'{name}="{value}"' for name, value in labels.items())])
    return f"{metric}{{{selector}}}"


def times(kind: str, quick: str, slow: str) -> dict[str, str]:
    """Counts of values below 20 ms, and of all values, which are below half a second."""
    counts = {"0.02": quick, "0.5": slow, "+Inf": slow}
    name = f"pilotfish_edge_{kind}_seconds_bucket"
    return {of(EDGE, name, le=bound): values for bound, values in counts.items()}


def cases() -> Iterator[Case]:
    """Yield for each alert a case in which it fires, and cases in which it does not."""

    def both(alert: str, at: str, fires: dict[str, str], *others: dict[str, str]) -> Iterator[Case]:
        yield Case(alert, True, at, fires)
        yield from (Case(alert, False, at, other) for other in others)

    for alert, labels, at in (
        ("PilotfishEdgeDown", EDGE, "4m"),
        ("PilotfishDeviceDown", DEVICE, "4m"),
        ("PilotfishWatchDown", WATCH, "8m"),
    ):
        up = of(labels, "up")
        yield from both(alert, at, {up: "0x9"}, {up: "1x9"}, {up: "1x7 0 1x4"})
    for alert, labels, name in (
        ("PilotfishEdgeGpuIdle", EDGE, "pilotfish_edge_gpu_idle"),
        ("PilotfishDeviceGpuIdle", DEVICE, "pilotfish_gpu_idle"),
    ):
        idle = of(labels, name)
        yield from both(alert, "20m", {idle: "1x30"}, {idle: "0x30"}, {idle: "0x14 1x16"})
    devices = of(EDGE, "pilotfish_edge_devices")
    yield from both("PilotfishEdgeNoDevices", "40m", {devices: "3x10 0x40"}, {devices: "0x50"})
    full, few, busy, internal = (
        of(EDGE, "pilotfish_edge_refusals_total", code=code)
        for code in ("too-many-sessions", "rate-limited", "busy", "internal")
    )
    yield from both(
        "PilotfishEdgeFull",
        "20m",
        {full: "0+3x30"},
        {few: "0+3x30"},
        {full: "0x2 3x28"},
    )
    quick = times("verify", "0+100x40", "0+100x40")
    yield from both(
        "PilotfishEdgeQueueLong",
        "30m",
        times("queue", "0x40", "0+100x40") | quick,
        times("queue", "0+100x40", "0+100x40") | quick,
        times("queue", "0x40", "0+100x40") | times("verify", "0x40", "0+100x40"),
    )
    yield from both(
        "PilotfishEdgePassSlow",
        "30h",
        times("verify", "0+500x348 174000x12", "0+500x360"),
        times("verify", "0+500x360", "0+500x360"),
        times("verify", "0x360", "0+500x360"),  # slow since ever
    )
    key, noise = (
        of(EDGE, "pilotfish_edge_handshakes_refused_total", reason=reason)
        for reason in ("key", "broken")
    )
    yield from both(
        "PilotfishEdgeKeysRefused",
        "12m",
        {key: "0+1x20"},
        {noise: "0+1x20"},
        {key: "0x5 3x15"},
    )
    failed = of(EDGE, "pilotfish_edge_failed_passes_total")
    none = "0x20"
    yield from both(
        "PilotfishEdgeErrors",
        "8m",
        {failed: "0x5 1x15", internal: none},
        {failed: none, internal: none},
        {failed: none, internal: none, busy: "0+1x20"},
    )
    yield Case("PilotfishEdgeErrors", True, "8m", {failed: none, internal: "0x5 1x15"})
    applied = of(EDGE, "pilotfish_edge_config_last_reload_successful")
    broken = of(EDGE, "pilotfish_edge_broken_key_files")
    yield from both(
        "PilotfishEdgeSettingsNotInForce",
        "10m",
        {applied: "0x20", broken: none},
        {applied: "1x20", broken: none},
    )
    yield Case("PilotfishEdgeSettingsNotInForce", True, "10m", {applied: "1x20", broken: "2x20"})
    node = of(EDGE, "pilotfish_edge_node_up", node="b")
    yield from both("PilotfishEdgeNodeMissing", "5m", {node: "0x9"}, {node: "1x9"})
    crowded = of(EDGE, "pilotfish_edge_connections_crowded")
    yield from both("PilotfishEdgeCrowded", "9m", {crowded: "1x20"}, {crowded: none})
    memory, started = (
        of(EDGE, name) for name in ("process_resident_memory_bytes", "process_start_time_seconds")
    )
    yield from both(
        "PilotfishEdgeMemoryGrows",
        "52h",
        {memory: "1000000+5000x640", started: "0x640"},
        {memory: "1000000+50x640", started: "0x640"},
        {memory: "1000000+5000x640", started: "0x300 90000x340"},  # it has started a day ago
        {memory: "_x240 1000000+5000x400", started: "_x240 0x400"},  # it is scraped for 32 h
    )
    yield Case(  # its wall clock is ahead of that of Prometheus
        "PilotfishEdgeMemoryGrows",
        True,
        "52h",
        {memory: "1000000+5000x640", started: "9e9x640"},
    )

    link = of(DEVICE, "pilotfish_link_up")
    yield from both("PilotfishDeviceEdgeAway", "5m", {link: "0x9"}, {link: "1x9"})
    no, lost = (of(DEVICE, "pilotfish_link_state", state=each) for each in ("refused: key", "lost"))
    yield from both(
        "PilotfishDeviceRefused",
        "5m",
        {no: "1x9", lost: "0x9"},
        {no: "0x9", lost: "1x9"},
    )
    drafted, accepted = (
        of(DEVICE, f"pilotfish_spec_decode_num_{kind}_tokens_total", protocol="greedy")
        for kind in ("draft", "accepted")
    )
    yield from both(
        "PilotfishDeviceAcceptanceFell",
        "30h",
        {drafted: "0+500x360", accepted: "0+300x340 102000+100x19"},
        {drafted: "0+500x360", accepted: "0+300x360"},
        {drafted: "0+10x360", accepted: "0+10x340 3400+0x19"},  # too few tokens to tell
    )
    bad, unknown = (of(DEVICE, "pilotfish_http_requests_total", status=each) for each in (503, 404))
    yield from both(
        "PilotfishDeviceFails",
        "20m",
        {bad: "0+1x30"},
        {unknown: "0+1x30"},
    )
    damaged = of(DEVICE, "pilotfish_weights_damaged")
    yield from both("PilotfishDeviceDrafterDamaged", "2m", {damaged: "1x9"}, {damaged: "0x9"})

    away = of(WATCH, "pilotfish_watch_away")
    yield from both("PilotfishWatchEdgeAway", "5m", {away: "1x9"}, {away: "0x3 1 0x9"})
    rtt = of(WATCH, "pilotfish_watch_probe_rtt_p90_seconds")
    yield from both(
        "PilotfishWatchRttHigh",
        "20m",
        {rtt: "0.7x30", away: "0x30"},
        {rtt: "0.3x30", away: "0x30"},
        {rtt: "0.7x30", away: "0x10 1x20"},  # the last probe is from before the outage
    )
    age, every, failing = (
        of(WATCH, f"pilotfish_watch_{name}")
        for name in ("last_row_age_seconds", "interval_seconds", "disk_failing")
    )
    hangs = {age: "0+60x40", every: "300x40", away: "0x40", failing: "0x40"}
    yield from both(
        "PilotfishWatchNoRows",
        "30m",
        hangs,
        hangs | {age: "0 60 120 180 240 0 60 120 180 240 0x30"},
        hangs | {away: "1x40"},
        hangs | {failing: "1x40"},  # which has an alert of its own
    )
    yield from both("PilotfishWatchDiskFails", "3m", {failing: "1x9"}, {failing: "0x9"})
    dropped = of(WATCH, "pilotfish_watch_dropped_rows_total")
    yield from both("PilotfishWatchRowsLost", "9m", {dropped: "0x3 5x9"}, {dropped: "0x12"})


@pytest.fixture
def rules(tmp_path: Path) -> list[str]:
    """The files of rules in the test's folder, by name."""
    for name, text in monitoring_files().items():
        (tmp_path / name).write_text(text)
    return [name for name in monitoring_files() if name.endswith(".yml")]


def promtool(folder: Path, *words: str) -> None:
    command = [tool("promtool"), *words]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_promtool_accepts_the_rules(tmp_path: Path, rules: list[str]) -> None:
    promtool(tmp_path, "check", "rules", "--lint=all", "--lint-fatal", *rules)


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path, rules: list[str]) -> None:
    names = re.findall(r"- alert: (\w+)", "".join(monitoring_files().values()))
    for fires in (True, False):
        assert {case.alert for case in cases() if case.fires is fires} == {*names}
    for rule_file, interval in product(rules, ("1m", "5m")):
        wanted = [
            case
            for case in cases()
            if f"- alert: {case.alert}\n" in monitoring_files()[rule_file]
            and case.at.endswith("h") == (interval == "5m")
        ]
        unit = {
            "rule_files": [rule_file],
            "evaluation_interval": interval,
            "tests": [unit_test(wanted, interval)],
        }
        (tmp_path / "unit.json").write_text(json.dumps(unit))  # JSON is YAML, too
        promtool(tmp_path, "test", "rules", "unit.json")


def unit_test(wanted: list[Case], interval: str) -> dict[str, Any]:
    """Return the test of all cases as promtool reads it; each case is an instance of its own."""
    series, claims = [], []
    for number, case in enumerate(wanted):
        name = f"{case.alert}-{number}"
        series += [
            {"series": each.replace(INSTANCE, name), "values": values}
            for each, values in case.series.items()
        ]
        firing = f'alertname="{case.alert}",alertstate="firing",instance="{name}"'
        claims.append(
            {
                "expr": f"count by (instance) (ALERTS{{{firing}}})",
                "eval_time": case.at,
                "exp_samples": [{"labels": f'{{instance="{name}"}}', "value": 1}] * case.fires,
            }
        )
    return {"interval": interval, "input_series": series, "promql_expr_test": claims}


def test_each_alert_says_what_to_do_and_where_to_read() -> None:
    for name, text in monitoring_files().items():
        for block in text.split("- alert: ")[1:] if name.endswith(".yml") else ():
            assert re.search(r"severity: (critical|warning)\b", block), block
            for annotation in ("summary", "description", "runbook"):
                assert f"          {annotation}: " in block, block
            path, _, anchor = re.findall(r"runbook: (\S+)", block)[0].partition("#")
            document = (ROOT / path).read_text("utf-8")
            headings = re.findall(r"^#+ (.+)$", document, re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
            assert not anchor or anchor in anchors, block
