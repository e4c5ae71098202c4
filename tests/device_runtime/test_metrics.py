"""`/metrics`: what is counted, what is absent, and what Prometheus says to it."""

from __future__ import annotations

import shutil
import subprocess
import threading

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra `serve`")


from pilotfish import Device
from pilotfish.base.version import SOFTWARE
from pilotfish.device_runtime.energy import rails
from pilotfish.device_runtime.link.connectivity import Connectivity
from pilotfish.device_runtime.record import (
    STAGES,
    Choice,
    Probing,
    Recovery,
    Round,
)
from pilotfish.device_runtime.service.service_metrics import ServiceMetrics
from pilotfish.device_runtime.service.status import ServiceStatus
from pilotfish.engines.language_model import Execution
from pilotfish.wire.link.state import READINGS, LinkState, Reading
from pilotfish.wire.protocols import names
from tests.lab.test_host import sensor
from tests.support.known_rtt import know_rtt
from tests.support.service_facts import DOWN, STATE, UP, a_round, an_answer, samples


@pytest.fixture
def metrics():
    opened = ServiceMetrics([])
    yield opened
    opened.close()


def everything(metrics: ServiceMetrics) -> None:
    """Have every series that there is."""
    for protocol in (*names(), "tomorrow's"):
        window = 0 if protocol in ("stream", "local") else 40
        item = a_round(protocol, window=window, accepted=window, tokens=window + 1)
        metrics.add_round(item)
        recovery = Recovery(at=3, lost_s=1.5, local_tokens=2)
        choice = Choice(policy="model", protocol=protocol, window=4, token_s=None, reason="")
        metrics.add_generation(an_answer([item, a_round()], recoveries=[recovery], choice=choice))
    for link in (UP, DOWN):
        metrics.set_link(link, LinkState(**dict.fromkeys(LinkState.__annotations__, STATE.rtt)))
    metrics.add_request("/v1/models", 200, 0.01)
    metrics.count_refusal("busy")
    metrics.set_queue(2, 1)


def accept_by_promtool(exposition: bytes) -> None:
    """Prometheus' own tool has nothing to say about it."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=exposition, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_promtool_accepts_every_series_that_there_is(tmp_path):
    sensor(tmp_path, "1-0040", {1: ("VDD_IN", "5000", "2000")})
    fresh, full = ServiceMetrics([]), ServiceMetrics(rails(tmp_path))
    everything(full)
    for metrics in (fresh, full):
        accept_by_promtool(metrics.exposition())
        metrics.close()


def test_speculation_is_counted_under_vllms_names(metrics):
    metrics.add_round(a_round(accepted=2))
    metrics.add_round(a_round(accepted=4, tokens=5))
    result = samples(metrics)
    of = '{protocol="greedy"}'
    drafts = result["pilotfish_spec_decode_num_drafts_total" + of]
    accepted = result["pilotfish_spec_decode_num_accepted_tokens_total" + of]
    assert (drafts, accepted) == (2, 6)
    assert result["pilotfish_spec_decode_num_draft_tokens_total" + of] == 8
    by_position = [
        result[f'pilotfish_spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}']
        for i in range(4)
    ]
    assert by_position == [2, 2, 1, 1]
    assert result['pilotfish_link_bytes_total{direction="up",purpose="rounds"}'] == 200
    assert "pilotfish_spec_decode_num_forgiven_tokens_total" + of not in result


def test_what_a_decision_head_forgave_is_counted(metrics):
    status = ServiceStatus(drafter="tiny", lanes=2)
    for forgiven in (0, 2):
        item = a_round("wisv-full", accepted=3, tokens=4, notes={"forgiven": forgiven})
        metrics.add_round(item)
        status.add_round(item)
    counted = 'pilotfish_spec_decode_num_forgiven_tokens_total{protocol="wisv-full"}'
    assert samples(metrics)[counted] == 2
    status.add_generation(an_answer([item, item], protocol="wisv-full"))
    info = status.snapshot()
    assert (info["forgiven"], info["last"]["forgiven"]) == (2, 4)


def test_tokens_of_real_answers_are_counted_by_where_they_came_from(metrics, device):
    """As many of each origin as the pieces of the same answers told."""
    info: dict[str, int] = {}
    for protocol, more in (
        ("coupled", {"window": 4}),
        ("dssd", {"window": 2}),
        ("tree", {"expansion": [2, 2, 1]}),
        ("stream", {}),
        ("ahead", {}),
        ("local", {}),
    ):
        options = {"max_tokens": 24, "seed": 5, "temperature": 1.0, **more}
        for piece in device.stream([3, 1, 4], protocol=protocol, **options):
            info[piece.origin] = info.get(piece.origin, 0) + len(piece.tokens)
        for record in device.last.rounds:
            metrics.add_round(record)
        metrics.add_generation(device.last)
    assert set(info) == {"drafted", "corrected", "bonus", "target", "local"}
    result = samples(metrics)
    for origin, count in info.items():
        assert result[f'pilotfish_generation_tokens_total{{origin="{origin}"}}'] == count


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (a_round(window=4, accepted=2, tokens=3), {"drafted": 2, "corrected": 1}),
        (a_round(window=4, accepted=4, tokens=5), {"drafted": 4, "bonus": 1}),
        (a_round(window=4, accepted=4, tokens=2), {"drafted": 2}),  # cut at the end
        (a_round(window=4, accepted=4, tokens=5, forced=(0, 1, 2, 3)), {"forced": 4, "bonus": 1}),
        (a_round(window=4, accepted=4, tokens=2, forced=(1, 3)), {"drafted": 1, "forced": 1}),
        (a_round("stream", window=0, accepted=0, tokens=3), {"target": 3}),
        (a_round("ahead", window=0, accepted=0, tokens=1), {"target": 1}),
        (a_round("ahead", window=5, accepted=2, tokens=3), {"drafted": 2, "corrected": 1}),
        (a_round("local", window=0, accepted=0, tokens=1), {"local": 1}),
    ],
)
def test_origins_of_a_round(record, expected):
    assert {origin: len(ids) for origin, ids, _ in record.origins if ids} == expected


def test_drafted_and_forced_tokens_take_turns_in_order():
    item = a_round(window=5, accepted=4, tokens=5, forced=(1, 2))
    messages = [("drafted", [0]), ("forced", [1, 2]), ("drafted", [3]), ("corrected", [4])]
    assert [run[:2] for run in item.origins] == messages
    assert not any(run.key for run in item.origins)


def test_key_and_other_tokens_take_turns_in_order():
    item = a_round(window=5, accepted=4, tokens=5, forced=(1, 2), key=(2, 3, 4))
    assert [*item.origins] == [
        ("drafted", [0], False),
        ("forced", [1], False),
        ("forced", [2], True),
        ("drafted", [3], True),
        ("corrected", [4], True),
    ]


def test_a_baseline_has_no_stages_that_it_lacks(metrics):
    local = Round(protocol="local", start=0, window=0, accepted=0, tokens=[1])
    local.timings.draft = 0.02
    metrics.add_round(local)
    metrics.add_round(a_round())
    result = samples(metrics)
    for stage in STAGES:
        name = "pilotfish_stage_seconds_count"
        assert result[f'{name}{{protocol="greedy",stage="{stage}"}}'] == 1
        assert (f'{name}{{protocol="local",stage="{stage}"}}' in result) == (stage == "draft")
    assert result['pilotfish_stage_seconds_sum{protocol="greedy",stage="verify"}'] == 0.04


def test_an_answer_tells_its_times_and_its_recoveries(metrics):
    rounds = [a_round(tokens=3), a_round(tokens=3), a_round(tokens=4)]
    recoveries = [
        Recovery(at=3, lost_s=1.5, local_tokens=4),
        Recovery(at=6, lost_s=9.0, local_tokens=0),
    ]
    metrics.add_generation(an_answer(rounds, recoveries=recoveries, probing=Probing(2, 300, 200)))
    result = samples(metrics)
    assert result["pilotfish_time_to_first_token_seconds_sum"] == pytest.approx(0.2)
    # a second for the seven tokens after those of the first round
    assert result["pilotfish_time_per_output_token_seconds_sum"] == pytest.approx(1 / 7)
    assert result["pilotfish_recovery_seconds_count"] == 2
    assert result["pilotfish_recovery_seconds_sum"] == 10.5
    assert result["pilotfish_recovery_local_tokens_total"] == 4
    assert result['pilotfish_link_bytes_total{direction="up",purpose="probing"}'] == 300
    name = "pilotfish_generations_total"
    assert result[f'{name}{{finish_reason="stop",policy="none",protocol="greedy"}}'] == 1
    assert result['pilotfish_protocol_in_use{protocol="greedy"}'] == 1
    assert result['pilotfish_protocol_in_use{protocol="stream"}'] == 0


def test_the_link_is_told_as_far_as_it_is_known(metrics):
    assert not any(name.startswith("pilotfish_link_up") for name in samples(metrics))
    metrics.set_link(UP, None)
    assert samples(metrics)["pilotfish_link_up"] == 1
    assert "pilotfish_link_rtt_seconds" not in samples(metrics)
    metrics.set_link(UP, STATE)
    result = samples(metrics)
    assert result["pilotfish_link_rtt_seconds"] == 0.05
    assert result["pilotfish_link_goodput_up_bytes_per_second"] == 2e6 / 8
    assert result["pilotfish_link_signal_dbm"] == -71
    assert result['pilotfish_link_reading_age_seconds{reading="up"}'] >= 1.0
    assert "pilotfish_link_goodput_down_bytes_per_second" not in result
    for link in (DOWN, DOWN, UP, DOWN):
        metrics.set_link(link, STATE)
    result = samples(metrics)
    assert (result["pilotfish_link_up"], result["pilotfish_link_losses_total"]) == (0, 2)
    states = {name: value for name, value in result.items() if name.startswith("pilotfish_link_st")}
    assert [name for name, value in states.items() if value] == [
        'pilotfish_link_state{state="refused: key"}'
    ]
    assert len(states) == len(Connectivity)


def test_every_reading_of_the_link_is_a_metric(metrics):
    reading = Reading(value=8.0, age_s=1.0, samples=1)
    metrics.set_link(UP, LinkState(**dict.fromkeys(READINGS, reading)))
    ages = [name for name in samples(metrics) if "link_reading_age_seconds" in name]
    assert {name.split('"')[1] for name in ages} == set(READINGS)


def test_what_clients_ask_for_does_not_grow_the_metrics(metrics):
    for i in range(1000):
        metrics.add_request(f"/wp-admin/{i}", 404, 0.001)
        metrics.count_refusal(f"reason {i}")
        metrics.add_round(a_round(f"protocol {i}", window=128, accepted=128, tokens=129))
    lines = metrics.exposition().count(b"\n")
    metrics.add_request("/another", 404, 0.001)
    metrics.add_round(a_round("another", window=128, accepted=128, tokens=129))
    assert metrics.exposition().count(b"\n") == lines < 1500
    assert samples(metrics)['pilotfish_http_requests_total{route="other",status="404"}'] > 900


def test_it_counts_right_from_many_threads(metrics):
    def lane() -> None:
        for _ in range(200):
            metrics.add_round(a_round())

    threads = [threading.Thread(target=lane) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        metrics.exposition()
    result = samples(metrics)
    assert result['pilotfish_spec_decode_num_drafts_total{protocol="greedy"}'] == 800


def test_the_process_is_told(metrics):
    result = samples(metrics)
    assert result["process_resident_memory_bytes"] > 1e6
    assert result["process_open_fds"] > 0
    [build] = [name for name in result if name.startswith("pilotfish_build_info{")]
    assert SOFTWARE in build
    assert 'provider="none"' in build


def test_how_the_drafter_is_run_is_told():
    metrics = ServiceMetrics([], "tiny", Execution("cuda", "int4", 4))
    [build] = [name for name in samples(metrics) if name.startswith("pilotfish_build_info{")]
    for label in ('model="tiny"', 'provider="cuda"', 'precision="int4"', 'threads="4"'):
        assert label in build
    metrics.close()


def test_a_device_feeds_both(metrics, pair, edge):
    status = ServiceStatus(drafter="tiny", lanes=2)

    def on_round(record: Round) -> None:
        metrics.add_round(record)
        status.add_round(record)

    with Device(pair.draft, edge.endpoint, threads=1, on_round=on_round) as device:
        know_rtt(device)
        answer = device.generate([3, 1, 4], protocol="auto", max_tokens=12, seed=1)
        status.add_generation(answer)
        metrics.add_generation(answer)
        metrics.set_link(device.link_status, device.link_state())
        status.set_link(device.link_status, device.link_state())
    result, info = samples(metrics), status.snapshot()
    assert info["protocol"]["name"] == answer.protocol
    assert info["protocol"]["reason"]
    assert info["link"]["up"] is True
    assert info["link"]["rtt"]["value"] == result["pilotfish_link_rtt_seconds"] > 0
    counted = sum(v for k, v in result.items() if k.startswith("pilotfish_generation_tokens_"))
    assert counted == len(answer.tokens) > 0
