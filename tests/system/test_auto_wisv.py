"""protocol="auto" with a decision head: a real device, a real edge, an emulated link that moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.draft_source import DraftSource
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.probing import ping, refresh
from pilotfish.device_runtime.plan import Auto
from pilotfish.device_runtime.record import Generation
from pilotfish.emulation.emulator import Emulator
from pilotfish.wire.link.meter import SMALL_BYTES
from tests.conftest import Pair
from tests.support import web
from tests.support.hostile import PROMPT
from tests.support.serving import Serving
from tests.support.threshold_link import FAR_S, NEAR_S, TRIES, road
from tests.system.test_auto import device_run

__all__ = ["road"]  # a fixture

FULL, SELECTIVE = "wisv-full", "wisv-selective"
THRESHOLD = Auto(lossy=True, policy="threshold")


@pytest.fixture(scope="module")
def device(pair: Pair, road: Emulator) -> Iterator[Device]:
    with Device(pair.draft, road.endpoint, threads=1) as opened:
        yield opened


def measured_s(answer: Generation) -> float:
    """The RTT that this very request measured, and that its choice went by."""
    assert answer.probing.pings >= 1
    assert answer.link is not None
    assert answer.link.rtt is not None
    assert answer.link.rtt.samples == 1
    return answer.link.rtt.value


def requests(device: Device, rtt_s: float, auto: Auto = THRESHOLD, **options: Any) -> Generation:
    """An answer whose request measured this RTT: the first one, unless the machine held it up."""
    for _ in range(TRIES):
        answer = device.generate(PROMPT, protocol=auto, max_tokens=12, **options)
        found_s = measured_s(answer)
        assert found_s >= rtt_s  # nothing makes a trip shorter
        if rtt_s == FAR_S:
            return answer
        assert found_s < FAR_S  # not what an earlier request measured
        if found_s < 0.010:
            return answer
    pytest.fail("the machine is too busy to see a short RTT")


@pytest.mark.timing
def test_a_moved_link_switches_the_protocol_of_the_very_next_request(
    device: Device, road: Emulator
) -> None:
    for rtt_s, wanted in ((NEAR_S, SELECTIVE), (FAR_S, FULL), (NEAR_S, SELECTIVE), (FAR_S, FULL)):
        road.set(rtt_s=rtt_s)
        answer = requests(device, rtt_s)
        assert answer.protocol == wanted
        assert {each.protocol for each in answer.rounds} == {wanted}
        assert answer.choice is not None
        assert answer.choice.policy == "threshold"
        assert "10 ms" in answer.choice.reason


@pytest.mark.timing
def test_a_link_that_moves_within_an_answer_counts_for_the_next_one(
    device: Device, road: Emulator
) -> None:
    road.set(rtt_s=NEAR_S)
    pieces = device.stream(PROMPT, protocol=THRESHOLD, max_tokens=40, window=2)
    next(pieces)
    road.set(rtt_s=FAR_S)
    for _ in pieces:
        pass
    assert device.last is not None
    assert len({each.protocol for each in device.last.rounds}) == 1  # an answer keeps its protocol
    assert requests(device, FAR_S).protocol == FULL


@pytest.mark.timing
def test_under_a_threshold_of_100_ms_it_does_not_switch(device: Device, road: Emulator) -> None:
    patient = Auto(lossy=True, policy="threshold", rtt_threshold_s=0.1)
    for rtt_s in (NEAR_S, FAR_S, NEAR_S):
        road.set(rtt_s=rtt_s)
        assert requests(device, rtt_s, patient).protocol == SELECTIVE


def test_both_protocols_say_the_same_of_one_link(device: Device) -> None:
    """The tiny pair's head does not look at the link."""
    texts = [
        device.generate(PROMPT, protocol=protocol, window=4, max_tokens=30, threshold=0.5).tokens
        for protocol in (FULL, SELECTIVE)
    ]
    assert texts[0] == texts[1]


@pytest.mark.timing
def test_predictive_takes_a_head_into_account(device: Device, road: Emulator) -> None:
    road.set(rtt_s=FAR_S)
    auto = Auto(among=["greedy", FULL, SELECTIVE])
    for _ in range(3):
        answer = device.generate(PROMPT, protocol=auto, max_tokens=20)
    assert answer.choice is not None
    assert {forecast.protocol for forecast in answer.choice.forecasts} == {
        "greedy",
        FULL,
        SELECTIVE,
    }
    cheapest: dict[str, float] = {}
    for forecast in answer.choice.forecasts:
        cheapest.setdefault(forecast.protocol, forecast.token_s)
    assert cheapest[SELECTIVE] > cheapest[FULL]  # a second exchange is 40 ms


def test_a_ping_behind_unread_replies_is_sent_again(pair: Pair, edge: EdgeServer) -> None:
    link = EdgeLink(edge.endpoint, None)
    try:
        link.set_hello(DraftSource.open(pair.draft, text=False, text_location=None).hello)
        link.handshake()
        for _ in range(3):
            ping(link)
        for _ in range(TRIES):
            link.estimator.on_sent(2 * SMALL_BYTES)  # a prompt, of an answer that was given up
            before = link.estimator.probing
            refresh(link, rates=False, anew=True)
            assert link.estimator.probing.since(before).pings == 2
            if link.estimator.rtt_is_new:  # the machine did not hold up the second one
                break
        rtt = link.state().rtt
        assert rtt is not None
        assert rtt.samples == 1
    finally:
        link.close()


def test_an_edge_without_a_head_for_this_drafter(pair: Pair) -> None:
    with (
        EdgeServer(pair.target, threads=1) as edge,
        Device(pair.draft, edge.endpoint, threads=1) as device,
    ):
        with pytest.raises(UnsupportedError, match="decision head for this drafter"):
            device.generate(PROMPT, protocol=THRESHOLD, max_tokens=4)
        with pytest.raises(UnsupportedError, match="decision head for this drafter"):
            device.generate(PROMPT, protocol=Auto(among=[FULL]), max_tokens=4)
        lossy = device.generate(PROMPT, protocol=Auto(lossy=True), max_tokens=4)
        assert lossy.choice is not None
        assert not {forecast.protocol for forecast in lossy.choice.forecasts} & {FULL, SELECTIVE}


# The command and the service


def test_the_command(pair: Pair, road: Emulator) -> None:
    road.set(rtt_s=FAR_S)
    common = ("--edge", road.endpoint, "--protocol", "auto", "--lossy", "--max-tokens", 4)
    threshold = (*common, "--policy", "threshold", "--stats")
    done = device_run(pair, *threshold)
    assert done.returncode == 0, done.stderr
    assert "above 10 ms" in done.stderr
    assert FULL in done.stderr
    done = device_run(pair, *threshold, "--rtt-threshold", "10000")
    assert done.returncode == 0, done.stderr
    assert "not above 10000 ms" in done.stderr
    assert SELECTIVE in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--protocol", "auto", "--rtt-threshold", "20"],
            64,
            "can only be used with policy threshold",
        ),
        (["--protocol", "greedy", "--rtt-threshold", "20"], 64, "go with --protocol auto"),
        (["--protocol", "auto", "--rtt-threshold", "-1"], 2, "is not at least 0"),
    ],
)
def test_the_command_says_what_is_wrong(
    pair: Pair, edge: EdgeServer, arguments: list[str], code: int, message: str
) -> None:
    done = device_run(pair, "--edge", edge.endpoint, *arguments)
    assert done.returncode == code
    assert message in done.stderr


def completed(service: Serving, **extension: Any) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 24,
        "temperature": 0,
        "pilotfish": extension,
    }
    return web.post(f"{service.url}/v1/chat/completions", json=body, timeout=60.0)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    reply: str = answer.json()["choices"][0]["message"]["content"]
    return reply


def test_a_request_over_http_may_allow_it(service: Serving) -> None:
    for name in (FULL, SELECTIVE):
        strict = completed(service, protocol=name, threshold=0, window=4)
        assert text(strict) == text(completed(service, protocol="greedy", window=4))
    for threshold_s, name in ((0, FULL), (60, SELECTIVE)):
        answer = completed(
            service, lossy=True, policy="threshold", rtt_threshold_s=threshold_s, threshold=0.5
        )
        assert text(answer)
        assert answer.json()["pilotfish"]["protocol"] == name


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        ({"protocol": FULL, "threshold": 1.5}, "threshold"),
        ({"protocol": FULL, "threshold": -0.1}, "threshold"),
        ({"protocol": FULL, "threshold": "high"}, "threshold"),
        ({"policy": "threshold"}, "allow lossy"),
        ({"lossy": True, "rtt_threshold_s": 0.02}, "only be used with policy threshold"),
        ({"lossy": True, "policy": "threshold", "rtt_threshold_s": -1}, "rtt_threshold_s"),
        ({"protocol": "greedy", "rtt_threshold_s": 0.02}, "can only be used with protocol auto"),
    ],
)
def test_a_request_over_http_that_makes_no_sense(
    service: Serving, extension: dict[str, Any], message: str
) -> None:
    answer = completed(service, **extension)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
