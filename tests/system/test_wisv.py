"""wisv over a real link: a device, an edge with a decision head, tiny models between them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.cli.export import default_artifact
from pilotfish.device_runtime import link_renewal
from pilotfish.device_runtime.record import Generation
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.lab.field.papers import wisv
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.hidden import HIDDEN_FORMATS, hidden_bytes
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SamplingParams
from tests.bridge.test_drafter import OWN, THEIRS
from tests.conftest import CONTEXT, HIDDEN, Pair
from tests.support.exchanges import Exchange, exchanges
from tests.support.hostile import PROMPT
from tests.support.judging import random_head, saved
from tests.support.prefill import prefill
from tests.support.thinned import thinned
from tests.support.tiny import tiny_artifact

assert exchanges  # a fixture
PROTOCOLS = ("wisv-full", "wisv-selective")
THRESHOLDS = (0.0, 0.3, 0.45, 0.5, 0.55, 0.7, 1.0)
PROMPTS = [PROMPT, [9], [*range(30, 60)], [63, 50, 4, 61, 31, 51, 53, 22]]


def forgiven(answer: Generation) -> int:
    return sum(each.notes.get("forgiven", 0) for each in answer.rounds)


def decisions(answer: Generation) -> list[tuple[Any, ...]]:
    """Of each round."""
    return [
        (r.start, r.window, r.accepted, r.notes.get("forgiven", 0), r.tokens) for r in answer.rounds
    ]


# What is committed


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("window", thinned([0, 1, 4, 16, "auto"], [0, 4, "auto"]))
def test_threshold_0_is_greedy_token_for_token(device: Device, protocol: str, window: Any) -> None:
    for prompt in PROMPTS:
        options = {"window": window, "max_tokens": 40}
        greedy = device.generate(prompt, protocol="greedy", **options)
        got = device.generate(prompt, protocol=protocol, threshold=0.0, **options)
        assert got.tokens == greedy.tokens
        assert decisions(got) == decisions(greedy)
        assert forgiven(got) == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_threshold_1_accepts_every_window_whole(device: Device, protocol: str) -> None:
    for prompt in PROMPTS:
        got = device.generate(prompt, protocol=protocol, threshold=1.0, window=6, max_tokens=40)
        assert [each.accepted for each in got.rounds] == [each.window for each in got.rounds]
        assert max(each.window for each in got.rounds) == 6
        assert forgiven(got) > 0
        # after a whole window comes the target's own token
        known = [*prompt, *got.tokens[:6]]
        (bonus,) = device.generate(known, protocol="stream", max_tokens=1).tokens
        assert got.tokens[6] == bonus


@pytest.mark.parametrize("window", thinned([0, 1, 3, 8, "auto"], [0, 3]))
def test_both_protocols_commit_the_same(device: Device, window: Any) -> None:
    spared = set()
    for prompt in PROMPTS:
        for threshold in THRESHOLDS:
            options = {"threshold": threshold, "window": window, "max_tokens": 30}
            full = device.generate(prompt, protocol="wisv-full", **options)
            selective = device.generate(prompt, protocol="wisv-selective", **options)
            assert full.tokens == selective.tokens
            assert decisions(full) == decisions(selective)
            spared.add(forgiven(full))
    assert len(spared) > 3 or window == 0, "nothing was in between"


@pytest.fixture
def last_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of drafted tokens in each pass over drafts that a window had not read."""
    reads: list[int] = []
    decode_last = ModelDrafter.decode_last

    def counted(drafter: ModelDrafter) -> None:
        if unread := len(drafter._window) - drafter._known_states:
            reads.append(unread)
        decode_last(drafter)

    monkeypatch.setattr(ModelDrafter, "decode_last", counted)
    return reads


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_at_thresholds_0_and_1_no_states_are_sent(
    pair: Pair,
    device: Device,
    head: str,
    exchanges: list[Exchange],
    last_reads: list[int],
    threshold: float,
) -> None:
    """What the head would say is known. The threshold is the request's, or the edge's own.

    A device does not know the edge's own: it then sends the states under `wisv-full`.
    """
    options: dict[str, Any] = {"window": 6, "max_tokens": 40}

    def commits(on: Device, protocol: str, **more: Any) -> list[tuple[Any, ...]]:
        exchanges.clear()
        return [
            each
            for prompt in PROMPTS
            for each in decisions(on.generate(prompt, protocol=protocol, **options, **more))
        ]

    def uploads() -> set[int]:
        """The numbers of bytes after the ids of each window."""
        return {sum(map(len, sent.frames[1:])) for sent in exchanges}

    full = commits(device, "wisv-full", threshold=threshold)
    assert len(exchanges) == len(full)
    assert uploads() == {0}
    assert not last_reads
    assert sum(window - accepted + forgiven for _, window, accepted, forgiven, _ in full) > 0
    assert commits(device, "wisv-selective", threshold=threshold) == full
    assert len(exchanges) == len(full)  # one exchange a round
    assert not last_reads
    between = commits(device, "wisv-selective", threshold=0.5)
    assert len(exchanges) > len(between)
    with (
        EdgeServer(pair.target, threads=1, head=head, threshold=threshold) as edge,
        Device(pair.draft, edge.endpoint, threads=1) as other,
    ):
        assert commits(other, "wisv-selective") == full
        assert len(exchanges) == len(full)
        assert commits(other, "wisv-full") == full
        assert max(uploads()) == 6 * hidden_bytes(HIDDEN, "int8")
    assert last_reads


def test_the_default_threshold_is_the_heads(pair: Pair, device: Device, head: str) -> None:
    wanted = device.generate(PROMPT, protocol="wisv-full", threshold=0.5, max_tokens=30).tokens
    assert device.generate(PROMPT, protocol="wisv-full", max_tokens=30).tokens == wanted
    with (
        EdgeServer(pair.target, threads=1, head=head, threshold=0.0) as strict,
        Device(pair.draft, strict.endpoint, threads=1) as other,
    ):
        greedy = other.generate(PROMPT, protocol="greedy", max_tokens=30).tokens
        assert other.generate(PROMPT, protocol="wisv-full", max_tokens=30).tokens == greedy


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_window_0_is_the_target_alone(
    device: Device, protocol: str, exchanges: list[Exchange]
) -> None:
    wanted = device.generate(PROMPT, protocol="stream", max_tokens=10)
    got = device.generate(PROMPT, protocol=protocol, window=0, threshold=1.0, max_tokens=10)
    assert got.tokens == wanted.tokens
    assert len(exchanges) == len(got.rounds) == 10


@pytest.fixture
def ending(
    pair: Pair, head: str, tmp_path: Path
) -> Callable[[list[int]], AbstractContextManager[EdgeServer]]:
    """An edge whose target is the pair's, but for the tokens that end its answers."""

    def edge(ends: list[int]) -> AbstractContextManager[EdgeServer]:
        path = tmp_path / "target"
        shutil.copytree(pair.target, path)
        manifest = path / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"eos_ids": ends}))
        return EdgeServer(path, threads=1, head=head)

    return edge


def test_windows_that_end_with_an_end_token(pair: Pair, device: Device, ending: Any) -> None:
    options = {"window": 8, "max_tokens": 40}
    whole = device.generate(PROMPT, protocol="wisv-full", threshold=1.0, **options)
    at, end = next(
        (each.start + i - len(PROMPT), token)
        for each in whole.rounds
        for i, token in enumerate(each.tokens[: each.accepted])
        if 0 < i < each.window - 1 and token not in whole.tokens[: each.start + i - len(PROMPT)]
    )
    with ending([end]) as edge, Device(pair.draft, edge.endpoint, threads=1) as other:
        for protocol in PROTOCOLS:
            got = other.generate(PROMPT, protocol=protocol, threshold=1.0, **options)
            assert got.tokens == whole.tokens[: at + 1]
            assert got.finish_reason == "stop"
            last = got.rounds[-1]
            assert last.window == last.accepted == len(last.tokens) < 8
        for threshold in THRESHOLDS:
            answers = [
                other.generate(PROMPT, protocol=protocol, threshold=threshold, **options)
                for protocol in PROTOCOLS
            ]
            assert answers[0].tokens == answers[1].tokens


def test_to_the_end_of_the_context(pair: Pair, ending: Any) -> None:
    """The state of a window's last token is read where there is just room for it."""
    prompt = [3 * i % 60 for i in range(CONTEXT - 30)]
    with ending([]) as edge, Device(pair.draft, edge.endpoint, threads=1) as device:
        for threshold in (0.0, 0.5, 1.0):
            answers = [
                device.generate(
                    prompt, protocol=name, threshold=threshold, window=16, max_tokens=99
                )
                for name in PROTOCOLS
            ]
            assert answers[0].tokens == answers[1].tokens
            assert len(answers[0].tokens) == 30
            if threshold == 0.0:
                greedy = device.generate(prompt, protocol="greedy", window=16, max_tokens=99)
                assert greedy.tokens == answers[0].tokens


# What is sent


@pytest.mark.parametrize("form", HIDDEN_FORMATS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_bytes_and_round_trips_as_sent(
    device: Device, exchanges: list[Exchange], protocol: str, form: str
) -> None:
    """wisv (5) and (7)-(10); a message's overhead is its header, whose size is bounded here."""
    options = {"threshold": 0.5, "window": 6, "max_tokens": 40, "hidden": form}
    answer = device.generate(PROMPTS[2], protocol=protocol, **options)
    assert forgiven(answer) > 0
    left = iter(exchanges)
    for each in answer.rounds:
        first = next(left)
        last = first
        up = bits_up(first)
        if protocol == "wisv-full":
            assert up == wisv.eq_5_full_upload_bits(each.window, sizes(first, form))
        else:
            assert up == wisv.eq_7_first_upload_bits(each.window, sizes(first, form))
            assert isinstance(first.answer.reply, m.StatesRequest) == (each.inquired > 0)
        if each.inquired:
            assert protocol == "wisv-selective"
            last = next(left)
            request = wisv.eq_8_request_bits(each.inquired, sizes(first, form))
            assert 8 * first.answer.downlink_bytes == request
            reply = wisv.eq_9_second_upload_bits(each.inquired, sizes(last, form))
            assert bits_up(last) == reply
            up += int(reply)
        verdict = last.answer.reply
        assert isinstance(verdict, m.Verdict)
        assert not last.answer.frames  # b_pos + b_tok of (4) are in its header
        assert last.answer.downlink_bytes == len(m.encode(verdict)) <= 68
        assert (*verdict.notes, 0)[0] == each.notes.get("forgiven", 0)
        down = last.answer.downlink_bytes
        down += first.answer.downlink_bytes if each.inquired else 0
        assert (8 * each.uplink_bytes, each.downlink_bytes) == (up, down)
    assert next(left, None) is None


def bits_up(sent: Exchange) -> int:
    assert not sent.answer.resent
    return 8 * sent.answer.uplink_bytes


def sizes(sent: Exchange, form: str) -> wisv.MessageBits:
    """An id has two bytes, a position one, and the codec says what a state has."""
    headers = len(m.encode(sent.message)), len(m.encode(sent.answer.reply))
    assert headers[0] <= 42
    assert headers[1] <= 68
    return wisv.MessageBits(
        token=16,
        position=8,
        hidden=8 * hidden_bytes(HIDDEN, form),
        overhead_up=8 * headers[0],
        overhead_down=8 * headers[1],
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_a_mismatch_nothing_is_asked_and_sent(
    pair: Pair, edge: EdgeServer, exchanges: list[Exchange], protocol: str
) -> None:
    """The drafter is the target: one message each way."""
    with Device(pair.target, edge.endpoint, threads=1) as device:
        wanted = device.generate(PROMPT, protocol="stream", max_tokens=21).tokens
        got = device.generate(PROMPT, protocol=protocol, window=6, threshold=0.5, max_tokens=21)
    assert got.tokens == wanted
    assert [each.inquired for each in got.rounds] == [0] * 3
    assert [len(each.tokens) for each in got.rounds] == [7] * 3  # a bonus token each
    assert [type(item.message) for item in exchanges] == [m.Window] * 3
    assert forgiven(got) == 0


def test_forgiving_depends_on_neither_format_nor_way(device: Device) -> None:
    """The formats differ, but hardly; what they cost is told by `test_frames_are_as_long_…`."""
    results = {}
    for form in HIDDEN_FORMATS:
        options = {"threshold": 0.5, "window": 6, "max_tokens": 40, "hidden": form}
        answers = [device.generate(PROMPT, protocol=name, **options) for name in PROTOCOLS]
        assert answers[0].tokens == answers[1].tokens
        results[form] = sum(each.uplink_bytes for each in answers[0].rounds[:1])
    assert results["int4"] < results["int8"] < results["fp16"]


def test_the_states_are_those_of_the_drafted_tokens(pair: Pair) -> None:
    """After verdicts of all kinds, as one pass over the whole text has them."""
    artifact = Artifact.open(pair.draft)
    drafter = ModelDrafter.open(artifact, provider="cpu", threads=1, context=None)
    fresh, random = Decoder(artifact), np.random.default_rng(2)
    ids, law = np.array(PROMPT, np.uint32), SamplingParams(sampling=Sampling(), seed=0)
    for window in (5, 1, 8, 0, 3, 16):
        draft = drafter.draft(ids, (1,) * window, PROTOCOL_REGISTRY["wisv-full"], law, ends=())
        assert draft.states is not None or draft.reader is not None
        text = np.concatenate([ids, draft.ids])
        wanted = prefill(fresh, 0, text.astype(np.int64), rows=len(text)).hidden[len(ids) :]
        np.testing.assert_allclose(draft.read_states(np.arange(window)), wanted, atol=1e-4)
        some = np.arange(0, window, 2)
        np.testing.assert_array_equal(
            draft.read_states(some), draft.read_states(np.arange(window))[some]
        )
        accepted = int(random.integers(window + 1))
        ids = np.concatenate([ids, draft.ids[:accepted], [random.integers(60)]]).astype(np.uint32)
        fresh.rollback(0, 0)


# Other pairs


@pytest.fixture(scope="module")
def bridged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """A drafter of another vocabulary than the target's."""
    folder = tmp_path_factory.mktemp("bridged")
    sharp: dict[str, Any] = {"sharpness": 0.8, "context": 512}
    draft = tiny_artifact(folder / "draft", tokens=OWN, eos="<x>", seed=5, **sharp)
    target = tiny_artifact(folder / "target", tokens=THEIRS, eos="<y>", seed=6, **sharp)
    head = random_head(draft.manifest, target.manifest, link=None)
    with (
        EdgeServer(target.path, threads=1, head=saved(head, folder)) as edge,
        Device(draft.path, edge.endpoint, threads=1) as device,
    ):
        yield device


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_a_drafter_of_another_vocabulary(bridged: Device, threshold: float) -> None:
    options = {"window": 4, "max_tokens": 40}
    prompt = "ab cd abcd a"
    full, selective = (
        bridged.generate(prompt, protocol=name, threshold=threshold, **options)
        for name in PROTOCOLS
    )
    assert full.tokens == selective.tokens
    assert decisions(full) == decisions(selective)
    if threshold == 0.0:
        assert full.tokens == bridged.generate(prompt, protocol="stream", max_tokens=40).tokens
    if threshold == 1.0:
        assert all(each.accepted == each.window for each in full.rounds)
        assert forgiven(full) > 0


@pytest.mark.slow
def test_real_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_renewal, "_EVERY_S", math.inf)  # a slow answer sends the link again
    # three layers short: what the default drafter proposes is hardly ever a mismatch
    draft, target = default_artifact("int8", 27), default_artifact("fp32")
    manifests = [Artifact.open(path).manifest for path in (draft, target)]
    head = saved(random_head(*manifests, seed=3, link=None), tmp_path)
    options = {"window": 6, "max_tokens": 32}
    with (
        EdgeServer(target, context=256, sessions=2, head=head) as edge,
        Device(draft, edge.endpoint, context=256) as device,
    ):
        prompt = "Why is the sky blue?"
        greedy = device.generate(prompt, protocol="greedy", **options)
        rounds = []
        for threshold in (0.0, 0.5, 1.0):
            full, selective = (
                device.generate(prompt, protocol=name, threshold=threshold, **options)
                for name in PROTOCOLS
            )
            assert full.tokens == selective.tokens
            assert decisions(full) == decisions(selective)
            sent = [sum(r.uplink_bytes for r in each.rounds) for each in (full, selective)]
            assert sent[0] > sent[1] if threshold == 0.5 else sent[0] == sent[1]
            if threshold == 0.0:
                assert full.tokens == greedy.tokens
            rounds.append(len(full.rounds))
        assert rounds[0] == len(greedy.rounds) > rounds[2]
