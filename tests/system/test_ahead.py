"""`ahead` with real processes: the text of `stream`, whatever becomes of hints, edges and links."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.emulation.emulator import Conditions, Emulator
from tests.conftest import Pair
from tests.device_runtime.bridged_devices.conftest import models as bridged_models
from tests.support.relay import Relay
from tests.support.serving import Serving, chat
from tests.support.thinned import thinned

assert bridged_models  # a fixture

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3, 5], [8, 9, 7, 9], [3, 2, 3, 8, 4, 6]]
SAMPLED = {"temperature": 1.0, "seed": 4}


@pytest.fixture(scope="module")
def far(pair: Pair, edge: EdgeServer) -> Iterator[Device]:
    """A device that is some milliseconds away, more or less."""
    road = Emulator(edge.endpoint, Conditions(rtt_s=0.01, jitter_s=0.01, seed=3))
    with road as link, Device(pair.draft, link.endpoint, threads=1) as device:
        yield device


CASES = [(temperature, hints) for temperature in (0.0, 1.0) for hints in ("all", "device", "edge")]


@pytest.mark.parametrize(
    ("temperature", "hints"), thinned(CASES, [(0.0, "all"), (1.0, "device"), (1.0, "edge")])
)
def test_the_text_is_that_of_stream(far: Device, temperature: float, hints: str) -> None:
    sources = set()
    for seed, prompt in enumerate(PROMPTS):
        options = {"temperature": temperature, "seed": seed, "max_tokens": 60}
        wanted = far.generate(prompt, protocol="stream", **options)
        got = far.generate(prompt, protocol="ahead", hints=hints, **options)
        assert got.tokens == wanted.tokens
        assert (got.text, got.finish_reason) == (wanted.text, wanted.finish_reason)
        sources |= {each.source for each in got.rounds if each.accepted}
    allowed = {"all": {"device", "text"}, "device": {"device"}, "edge": {"text"}}[hints]
    assert sources <= allowed
    assert sources or hints == "edge"  # where nothing repeats


def test_an_answer_may_end_at_any_token_of_a_run(device: Device) -> None:
    """By its length, and by a stop text."""
    options = {"protocol": "ahead", **SAMPLED}
    whole = device.generate(PROMPTS[1], max_tokens=40, protocol="stream", **SAMPLED)
    for most in range(1, 25):
        answer = device.generate(PROMPTS[1], max_tokens=most, **options)
        assert answer.tokens == whole.tokens[:most]
        assert sum(len(each.tokens) for each in answer.rounds) == len(answer.tokens)
    for at in range(1, min(20, len(whole.text) - 1)):
        stop = [whole.text[at : at + 2]]
        wanted = device.generate(PROMPTS[1], max_tokens=40, stop=stop, protocol="stream", **SAMPLED)
        answer = device.generate(PROMPTS[1], max_tokens=40, stop=stop, **options)
        assert (answer.text, answer.finish_reason) == (wanted.text, wanted.finish_reason)
        assert answer.finish_reason == "stop"


@pytest.mark.timing
def test_end_tokens_come_within_runs(pair: Pair, edge: EdgeServer) -> None:
    """The target drafts for itself: all is right, the end token included."""
    ended = 0  # answers whose last pass was cut within its drafts
    with Device(pair.target, edge.endpoint, threads=1) as device:
        for seed in range(25):
            options = {"temperature": 1.0, "seed": seed, "max_tokens": 80}
            wanted = device.generate(PROMPTS[0], protocol="stream", **options)
            got = device.generate(PROMPTS[0], protocol="ahead", hints="device", **options)
            assert got.tokens == wanted.tokens
            last = got.rounds[-1]
            ended += got.finish_reason == "stop" and 0 < last.accepted == len(last.tokens)
    assert ended


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_of_another_vocabulary(bridged_models, temperature: float) -> None:
    drafted = 0
    with (
        EdgeServer(bridged_models.target, threads=1) as edge,
        Device(bridged_models.draft, edge.endpoint, threads=1) as device,
    ):
        for seed in range(6):
            options = {"temperature": temperature, "seed": seed, "max_tokens": 40}
            text = "once there was a " + "fish " * seed
            wanted = device.generate(text, protocol="stream", **options)
            got = device.generate(text, protocol="ahead", hints="device", **options)
            assert got.tokens == wanted.tokens
            drafted += sum(each.nodes for each in got.rounds)
    assert drafted > 0


@pytest.mark.timing
@pytest.mark.parametrize("policy", ["fail", "wait", "local"])
def test_a_low_rate_costs_hints_and_not_the_answer(long_pair: Pair, policy: str) -> None:
    """Hints leave requests their share of a key's messages, and are never refused aloud."""
    with (
        EdgeServer(long_pair.target, rate=40, threads=1) as edge,
        Device(long_pair.draft, edge.endpoint, threads=1, on_link_loss=policy) as device,
    ):
        options = {"protocol": "ahead", "hints": "device", "max_tokens": 250, **SAMPLED}
        got = device.generate(PROMPTS[0], **options)
        assert got.recoveries == []
        assert sum(each.nodes for each in got.rounds) > 20
        time.sleep(1.0)
        wanted = device.generate(PROMPTS[0], **options | {"protocol": "stream"})
        assert got.tokens == wanted.tokens


@pytest.mark.timing
def test_after_a_break_hints_go_on_from_the_committed_tokens(
    long_pair: Pair, key_folders: dict[str, Path]
) -> None:
    """The session goes on at the same edge, but for hints that were under way."""
    with EdgeServer(long_pair.target, keys=key_folders["edge"], threads=1) as edge:
        relay = Relay(edge.endpoint)
        options = {"protocol": "ahead", "hints": "device", "max_tokens": 1000, "seed": 1}
        # the target drafts for itself: no correction lets the device begin anew
        with Device(long_pair.target, relay.endpoint, key_folders["alice"], threads=1) as device:
            wanted = device.generate(PROMPTS[0], **options | {"protocol": "stream"}).tokens
            got: list[int] = []
            cuts = [100, 300, 500, 700]
            for piece in device.stream(PROMPTS[0], **options):
                got += piece.tokens
                if cuts and len(got) > cuts[0]:
                    del cuts[0]
                    relay.cut()
            assert got == wanted
            assert device.last.recoveries
            assert sum(each.accepted for each in device.last.rounds if each.start > 150) > 20
        relay.close()


def test_a_drained_edge_and_its_successor(long_pair: Pair) -> None:
    options = {"protocol": "ahead", "max_tokens": 200, **SAMPLED}
    first = EdgeServer(long_pair.target, threads=1).start()
    try:
        with Device(long_pair.draft, first.endpoint, threads=1, on_link_loss="wait") as device:
            wanted = device.generate(PROMPTS[0], **options | {"protocol": "stream"}).tokens
            pieces = device.stream(PROMPTS[0], **options)
            got = list(next(pieces).tokens)
            os.kill(first.pid, signal.SIGTERM)
            first.stop()
            with EdgeServer(long_pair.target, first.endpoint, threads=1):
                got += [token for piece in pieces for token in piece.tokens]
            assert got == wanted
    finally:
        first.stop()


def test_under_local_the_answer_goes_on_and_hints_come_again(long_pair: Pair) -> None:
    """Alone the drafter's tokens are its own; back at the edge, hints follow these."""
    with EdgeServer(long_pair.target, threads=1, sessions=50) as edge:
        relay = Relay(edge.endpoint)
        options = {"protocol": "ahead", "max_tokens": 3000, **SAMPLED}
        with Device(long_pair.draft, relay.endpoint, threads=1, on_link_loss="local") as device:
            origins = []
            for piece in device.stream(PROMPTS[0], **options):
                origins.append(piece.origin)
                if len(origins) == 10:
                    relay.turn_to("tcp://127.0.0.1:1")
                    relay.cut()
                    back = threading.Timer(1.6, relay.turn_to, [edge.endpoint])
                    back.start()
                if "local" in origins and origins.count("drafted") > origins.index("local"):
                    break
            alone = origins.index("local")
            assert "local" not in origins[:alone]
            if origins[-1] != "local":
                assert {"drafted", "corrected", "target"} & {*origins[alone:]}
            back.join()
        relay.close()


def test_http_takes_it(service: Serving) -> None:
    client = service.client()
    texts = []
    for protocol in ("stream", "ahead"):
        fields = {"protocol": protocol, **({"hints": "device"} if protocol == "ahead" else {})}
        body = {"pilotfish": fields}
        answer = chat(client, "hello", max_tokens=40, temperature=1.0, seed=7, extra_body=body)
        texts.append(answer.choices[0].message.content)
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.timing
def test_the_default_pair(default_artifacts: Pair) -> None:
    """Real weights, over a road of 20 ms with jitter."""
    prompts = ["Why is the sky blue?", "Count from one to twenty.", "Write a haiku."]
    with (
        EdgeServer(default_artifacts.target, threads=1) as edge,
        Emulator(edge.endpoint, Conditions(rtt_s=0.02, jitter_s=0.01)) as link,
        Device(default_artifacts.draft, link.endpoint, threads=1) as device,
    ):
        accepted = 0
        for temperature in (0.0, 1.0):
            for prompt in prompts:
                options = {"temperature": temperature, "seed": 2, "max_tokens": 64}
                wanted = device.generate(prompt, protocol="stream", **options)
                got = device.generate(prompt, protocol="ahead", **options)
                assert got.tokens == wanted.tokens
                accepted += sum(each.accepted for each in got.rounds)
        assert accepted > 60
