"""An edge process with a drafter beside its target: texts, figures, memory, and how it ends."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish import Device
from pilotfish.engines.artifact import Artifact
from pilotfish.wire import messages as m
from tests.conftest import Pair
from tests.support.commands import complaint, start
from tests.support.daemons import Daemon, await_sample, free_port, running, scrape
from tests.support.hostile import PROMPT, RawClient, RawSession, resident_mib, take_tokens
from tests.support.tiny import tiny_artifact

TOKENS = 60


@pytest.fixture(scope="module")
def metrics() -> int:
    return free_port()


@pytest.fixture(scope="module")
def edge_with_drafter(long_pair: Pair, metrics: int) -> Iterator[Daemon]:
    flags = ("--target", long_pair.target, "--threads", 1, "--draft", long_pair.draft)
    with running(*flags, "--context", 512, "--metrics", metrics) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def device(long_pair: Pair, edge_with_drafter: Daemon) -> Iterator[Device]:
    with Device(long_pair.draft, edge_with_drafter.endpoint, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_the_streams_and_drafts_of_the_edge_come_true(
    device: Device, metrics: int, temperature: float
) -> None:
    requests = {"max_tokens": TOKENS, "temperature": temperature}
    before = scrape(metrics).get('hint_accepted_tokens_total{source="edge"}', 0)
    accepted = drafted = 0
    for seed in range(8):
        prompt = [seed + 1, 2, 3]
        alone = device.generate(prompt, protocol="stream", seed=seed, **requests)
        hinted = device.generate(prompt, protocol="ahead", hints="edge", seed=seed, **requests)
        assert hinted.tokens == alone.tokens
        assert len(hinted.tokens) == TOKENS
        ours = [round_ for round_ in hinted.rounds if round_.source == "edge"]
        accepted += sum(round_.accepted for round_ in ours)
        drafted += sum(round_.window for round_ in ours)
        assert not any(round_.source == "device" for round_ in hinted.rounds)
    assert 0 < accepted <= drafted
    figures = scrape(metrics)
    assert figures['hint_accepted_tokens_total{source="edge"}'] - before == accepted
    assert figures["drafter_tokens_total"] >= drafted
    assert figures["drafter_passes_total"] > 0
    assert figures["drafter_seconds_total"] > 0


def test_a_device_may_refuse_the_edges_drafts(device: Device) -> None:
    requests = {"max_tokens": TOKENS, "protocol": "ahead", "temperature": 0.0}
    answer = device.generate([5, 6, 7], hints="device", **requests)
    assert {round_.source for round_ in answer.rounds} <= {"", "device"}


def test_the_welcome_tells_how_fast_the_drafter_is(
    edge_with_drafter: Daemon, long_pair: Pair
) -> None:
    manifest = Artifact.open(long_pair.draft).manifest
    with RawClient(edge_with_drafter.endpoint) as client:
        client.say(
            m.Hello(
                version=m.VERSION,
                tokenizer=manifest.tokenizer_fingerprint,
                vocab_size=manifest.vocab_size,
                padded_vocab_size=manifest.padded_vocab_size,
                hidden_size=manifest.dimensions.hidden,
            )
        )
        welcome = client.receive()
    assert isinstance(welcome, m.Welcome)
    assert [draft.tokens for draft in welcome.drafts] == [1, 2, 4]
    assert all(draft.ns > 0 for draft in welcome.drafts)


def test_many_sessions_leave_nothing_behind(edge_with_drafter: Daemon, metrics: int) -> None:
    def sessions(count: int) -> None:
        with RawClient(edge_with_drafter.endpoint) as client:
            for _ in range(count):
                session = RawSession()
                client.send(*session.begin([*PROMPT, *range(1, 40)], "ahead"))
                client.send(*session.pull(12))
                take_tokens(client, 12)
                client.say(m.Close(session=session.id))

    before = scrape(metrics)
    sessions(40)
    held_mib = resident_mib(edge_with_drafter.pid)
    sessions(400)
    assert resident_mib(edge_with_drafter.pid) - held_mib < 4.0
    await_sample(metrics, "sessions", before["sessions"])
    time.sleep(0.1)
    after = scrape(metrics)
    assert after["drafter_tokens_total"] > before["drafter_tokens_total"] + 400
    time.sleep(0.2)  # it rests, having nothing to do
    assert scrape(metrics)["drafter_passes_total"] == after["drafter_passes_total"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_closes_in_the_middle_of_a_draft(long_pair: Pair, number: signal.Signals) -> None:
    flags = ("--target", long_pair.target, "--threads", 1, "--draft", long_pair.draft)
    with running(*flags) as daemon, RawClient(daemon.endpoint) as client:
        session = RawSession()
        client.send(*session.begin(PROMPT, "ahead"))
        client.send(*session.pull(100_000))
        take_tokens(client, 20)
        daemon.signal(number)
        assert daemon.ends() == {signal.SIGTERM: 0, signal.SIGINT: 130}[number]
        assert not any("Traceback" in line for line in daemon.lines)


def test_a_drafter_that_does_not_fit_is_refused_at_the_start(pair: Pair, tmp_path: Path) -> None:
    tiny_artifact(tmp_path / "other", vocab=96, seed=1)

    def serve(draft: Path) -> subprocess.Popen[str]:
        return start("edge", "serve", "--target", pair.target, "--draft", draft,
                     "--listen", "tcp://127.0.0.1:0")  # fmt: skip

    assert "same family" in complaint(serve(tmp_path / "other"), 76, 30)
    assert "nowhere" in complaint(serve(tmp_path / "nowhere"), 66, 30)
