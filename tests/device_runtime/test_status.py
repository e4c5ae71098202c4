"""`/status`: what a device service tells of its link, its rounds and its answers."""

from __future__ import annotations

import json
import time

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from pilotfish.device_runtime.link.connectivity import Connectivity, LinkStatus
from pilotfish.device_runtime.record import Choice, Recovery
from pilotfish.device_runtime.service.status import ServiceStatus, freshest
from pilotfish.wire.link.state import READINGS, LinkState, Reading
from tests.support.service_facts import DOWN, STATE, UP, a_round, an_answer

LOST = LinkStatus.from_state(Connectivity.LOST, "tcp://edge.example:7077", keys=True)


@pytest.fixture
def status():
    return ServiceStatus(drafter="tiny", lanes=2)


def test_a_new_service_knows_little_and_says_so(status):
    payload = json.loads(json.dumps(status.snapshot()))
    assert payload["link"]["up"] is None
    assert payload["acceptance"] == {"recent": None, "total": None}
    assert payload["rounds"] is payload["protocol"] is payload["last"] is payload["energy"] is None
    assert payload["lanes"] == {"total": 2, "running": 0, "waiting": 0}


def test_status_tells_of_the_link_since_when_and_how_old(status):
    status.set_link(UP, STATE)
    time.sleep(0.2)
    status.set_link(DOWN, STATE)
    time.sleep(0.1)
    status.set_link(DOWN, STATE)
    info = status.snapshot(edge="tcp://127.0.0.1:7077", target="big")
    assert info["link"]["up"] is False
    assert info["link"]["state"] == "refused: key"
    assert "pilotfish keys allow" in info["link"]["remedy"]
    assert 0.1 <= info["link"]["since_s"] < info["uptime_s"]
    assert info["link"]["rtt"]["value"] == 0.05
    assert info["link"]["rtt"]["age_s"] >= 0.5
    assert info["link"]["goodput_up"]["value"] == 2e6
    assert info["link"]["goodput_down"] is None
    assert (info["edge"], info["target"]) == ("tcp://127.0.0.1:7077", "big")


def test_status_tells_every_reading_of_the_link(status):
    reading = Reading(value=8.0, age_s=1.0, samples=3)
    status.set_link(UP, LinkState(**dict.fromkeys(READINGS, reading)))
    link = status.snapshot()["link"]
    names = [name for name in link if isinstance(link[name], dict)]
    assert names == [
        "rtt", "jitter", "goodput_up", "goodput_down", "retransmitted", "retransmitted_down",
        "signal",
    ]  # fmt: skip
    assert {(link[name]["value"], link[name]["samples"]) for name in names} == {(8.0, 3)}
    assert all(1.0 <= link[name]["age_s"] < 60.0 for name in names)


def test_of_several_connections_the_youngest_reading_of_each_kind_counts():
    old, young = (Reading(value=value, age_s=age_s, samples=1) for value, age_s in ((1, 9), (2, 1)))
    known = freshest([LinkState(rtt=old, up=young), None, LinkState(rtt=young, down=old)])
    assert known == LinkState(rtt=young, up=young, down=old)
    assert freshest([None, None]) is None


def test_status_tells_acceptance_and_the_stages_of_the_newest_protocol(status):
    for _ in range(100):
        status.add_round(a_round(accepted=0, tokens=1))
    for _ in range(64):
        status.add_round(a_round(accepted=4, tokens=5))
    info = status.snapshot()
    assert info["acceptance"]["recent"] == 1.0
    assert info["acceptance"]["total"] == pytest.approx(256 / (100 + 256))
    assert info["rounds"]["count"] == 64
    assert info["rounds"]["tokens"] == 5
    assert info["rounds"]["stages_s"]["verify"] == 0.04
    status.add_round(a_round("stream", window=0, accepted=0, tokens=1))
    assert status.snapshot()["rounds"]["count"] == 1


def test_status_tells_a_federations_omitted_mass_under_every_protocol(status):
    """It is the mean over verified positions and streamed tokens; repeated ones have none."""
    status.add_round(a_round(accepted=1, notes={"omitted_mass": 0.5}))
    status.add_round(a_round("stream", window=0, accepted=0, notes={"omitted_mass": 0.25}))
    status.add_round(a_round("stream", window=0, accepted=0, tokens=5))
    status.add_round(a_round("ahead", window=3, accepted=2, notes={"omitted_mass": 0.75}))
    assert status.snapshot()["omitted_mass"] == pytest.approx((0.5 + 0.25 + 0.75) / (2 + 1 + 3))


def test_status_tells_why_a_protocol_was_chosen_and_what_was_recovered(status):
    choice = Choice(policy="model", protocol="greedy", window=3, token_s=0.02, reason="cheapest")
    for i in range(40):
        recoveries = [Recovery(at=i, lost_s=0.5, local_tokens=0)]
        status.add_generation(an_answer([a_round()], choice=choice, recoveries=recoveries))
    payload = json.loads(json.dumps(status.snapshot()))
    assert payload["protocol"] == {
        "name": "greedy",
        "window": 3,
        "top_k": None,
        "expansion": None,
        "policy": "model",
        "reason": "cheapest",
    }
    assert payload["recoveries"]["count"] == 40
    assert [item["at"] for item in payload["recoveries"]["recent"]] == list(range(24, 40))
    assert payload["answers"] == 40
    assert payload["last"]["tokens_per_s"] == pytest.approx(3 / 1.2)


def test_status_tells_how_long_the_edge_is_away(status):
    assert status.snapshot()["link"]["away_s"] is None
    status.set_link(DOWN, STATE)
    assert status.snapshot()["link"]["away_s"] is None  # it was never there
    status.set_link(UP, STATE)
    assert status.snapshot()["link"]["away_s"] is None
    status.set_link(DOWN, STATE)
    time.sleep(0.1)
    status.set_link(LOST, STATE)  # another state, the same absence
    assert status.snapshot()["link"]["away_s"] >= 0.1 > status.snapshot()["link"]["since_s"]


def test_status_tells_the_speed_now_while_an_answer_runs(status):
    assert status.snapshot()["tokens_per_s"] is None
    status.set_queue(0, 1)
    assert status.snapshot()["tokens_per_s"] is None  # no round yet
    began_s = time.monotonic()
    for _ in range(6):
        status.add_round(a_round(tokens=3))
        time.sleep(0.05)
    took_s = time.monotonic() - began_s
    assert status.snapshot()["tokens_per_s"] == pytest.approx(15 / took_s, rel=0.2)
    status.set_queue(0, 0)
    assert status.snapshot()["tokens_per_s"] is None


def test_status_names_what_a_request_may_choose_and_what_a_loss_does(status):
    offered = [{"name": "auto", "window": True, "lossless": True}]
    payload = status.snapshot(on_link_loss="wait", protocols=offered)
    assert (payload["on_link_loss"], payload["protocols"]) == ("wait", offered)
    assert status.snapshot()["protocols"] == []
