"""A device whose drafter has other tokens than the edge's target: over real sockets, as it goes."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from device_runtime.bridge import Pair, Prompt
from device_runtime.choice import Evidence
from device_runtime.drafter import Drafter
from device_runtime.partners import Partners
from engines.artifact import Artifact
from engines.vocabulary import Vocabulary
from pilotfish import Device, EdgeServer, Piece
from tests import conftest
from tests.bridged import vocabulary
from tests.relay import Relay
from tests.test_bad_edge import Answer, LyingEdge
from tests.test_bridge_drafter import OWN, THEIRS
from tests.test_link_loss import NOWHERE, await_true, lose, tokens_of
from tests.tiny import tiny_artifact
from wire import messages as m
from wire.errors import (
    AccessDeniedError,
    EdgeLostError,
    InterruptedGenerationError,
    PairMismatchError,
    PromptTooLongError,
)

STRANGE = [*"uvw"]  # nothing in common with OWN
OTHERS = [*"abcdf", "Ġ", "cd", "fa", "Ġd"]
TEXT = "ab cd abcd a"
CONTEXT = 2048  # of targets; drafters may be given less
GREEDY: dict[str, Any] = {"protocol": "greedy", "window": 3, "max_tokens": 120}
COUPLED: dict[str, Any] = {**GREEDY, "protocol": "coupled", "temperature": 1.0, "seed": 4}


class Models(NamedTuple):
    """Artifact folders; but for ``draft`` they are of targets."""

    draft: Path
    target: Path
    other: Path
    strange: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    vocabularies = {"draft": OWN, "target": THEIRS, "other": OTHERS, "strange": STRANGE}
    for seed, (name, tokens) in enumerate(vocabularies.items()):
        path = folder / name
        sizes: dict[str, Any] = {"seed": seed, "context": CONTEXT, "sharpness": 0.8}
        tiny_artifact(path, tokens=tokens, eos=f"<end of {name}>", **sizes)
        if name != "draft":  # answers never end by themselves
            _change(path, eos_ids=[])
    return Models(*(folder / name for name in vocabularies))


def _change(path: Path, **fields: Any) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | fields))


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[EdgeServer]:
    with EdgeServer(models.target, threads=1, sessions=200) as opened:
        yield opened


@pytest.fixture(scope="module")
def other_server(models: Models) -> Iterator[EdgeServer]:
    with EdgeServer(models.other, threads=1, sessions=200) as opened:
        yield opened


@pytest.fixture(scope="module")
def strange_server(models: Models) -> Iterator[EdgeServer]:
    with EdgeServer(models.strange, threads=1) as opened:
        yield opened


@pytest.fixture
def relay(server: EdgeServer) -> Iterator[Relay]:
    opened = Relay(server.endpoint)
    yield opened
    opened.close()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def opened(models: Models, endpoint: str, policy: str = "fail", **options: Any) -> Device:
    return Device(models.draft, endpoint, threads=1, on_link_loss=policy, **options)


def wanted_of(device: Device, prompt: Any, wish: dict[str, Any]) -> list[int]:
    """What the target says by itself."""
    return device.generate(prompt, **{**wish, "protocol": "stream"}).tokens


# Links that break


@pytest.mark.parametrize("policy", ["wait", "fail"])
@pytest.mark.parametrize("wish", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_a_link_that_breaks_changes_nothing(
    models: Models, relay: Relay, policy: str, wish: dict[str, Any]
) -> None:
    with opened(models, relay.endpoint, policy) as device:
        wanted = wanted_of(device, TEXT, wish)
        got = []
        for piece in device.stream(TEXT, **wish):
            got.append(piece)
            if len(got) in (2, 20, 21, 40):
                relay.cut()
        assert tokens_of(got) == wanted
        assert len(wanted) == 120
        assert device.last is not None
        assert device.last.text == device.tokenizer.decode(wanted)
        assert sum(record.accepted for record in device.last.rounds) > 5  # it is of use


def test_lanes_say_what_each_would_say_alone(models: Models, relay: Relay) -> None:
    prompts = [TEXT, "dd ba", "abc" * 20]
    wishes = [GREEDY, COUPLED, {**COUPLED, "seed": 9}]
    with opened(models, relay.endpoint, "wait", lanes=3) as device:
        wanted = [wanted_of(device, *each) for each in zip(prompts, wishes, strict=True)]
        lanes = [device, device.beside(), device.beside()]
        got: list[list[int]] = [[] for _ in lanes]

        def talk(at: int) -> None:
            for piece in lanes[at].stream(prompts[at], **wishes[at]):
                got[at] += piece.tokens
                if len(got[at]) in (30, 60):
                    relay.cut()

        threads = [threading.Thread(target=talk, args=(at,)) for at in range(len(lanes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == wanted
        for lane in lanes[1:]:
            lane.close()


def test_the_drafter_alone_speaks_the_targets_tokens(
    models: Models, relay: Relay, server: EdgeServer
) -> None:
    with opened(models, relay.endpoint, "local") as device:
        wish = {**COUPLED, "max_tokens": 200}
        wanted = wanted_of(device, TEXT, wish)
        got, alone = [], 0
        for piece in device.stream(TEXT, **wish):
            got.append(piece)
            if len(got) == 10:
                lose(relay)
            if piece.origin == "local":
                alone += 1
                time.sleep(0.02)  # a slow drafter
                if alone == 5:
                    relay.turn_to(server.endpoint)
        first = next(at for at, piece in enumerate(got) if piece.origin == "local")
        assert tokens_of(got[:first]) == wanted[: len(tokens_of(got[:first]))]
        spoken = tokens_of(got[first : first + alone])
        known = {"a", "b", "c", "d", " ", ""}  # what both have; the end of neither is text
        assert {device.tokenizer.decode([token]) for token in spoken} <= known
        assert device.last is not None
        assert device.last.text == device.tokenizer.decode(tokens_of(got))
        assert got[-1].origin != "local", "it never came back"
        before = tokens_of(got[: first + alone])
        prompt = device.prompt(TEXT)
        rest = {**wish, "max_tokens": 200 - len(before)}
        again = wanted_of(device, [*prompt.ids.tolist(), *before], rest)
        assert tokens_of(got[first + alone :]) == again


# A drafter that is full


@pytest.mark.parametrize("wish", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_the_answer_goes_on_when_the_drafters_context_is_full(
    models: Models, server: EdgeServer, wish: dict[str, Any]
) -> None:
    with opened(models, server.endpoint, context=48) as device:
        assert device.context == CONTEXT
        wish = {**wish, "max_tokens": 150}
        for text in (TEXT, "abcd" * 40):  # the second is too long from the beginning
            wanted = wanted_of(device, text, wish)
            got = device.generate(text, **wish)
            assert got.tokens == wanted
            assert got.finish_reason == "length"
            windows = [record.window for record in got.rounds]
            assert windows[-20:] == [0] * 20
            assert (max(windows) > 0) == (text == TEXT)
        assert device.generate(TEXT, **GREEDY).rounds[0].window == 3  # there is room again


def test_local_ends_where_the_drafter_is_full(models: Models, server: EdgeServer) -> None:
    with opened(models, server.endpoint, context=48) as device:
        got = device.generate(TEXT, protocol="local", max_tokens=150)
        assert 10 < len(got.tokens) < 150
        assert got.finish_reason == "length"
        with pytest.raises(PromptTooLongError, match="drafter's"):
            device.generate("xx" * 40 + "abcd" * 40, protocol="local")
        for protocol in ("local", "greedy"):  # nothing was spoilt
            assert device.generate(TEXT, protocol=protocol, max_tokens=5).tokens


def test_neither_edge_nor_room(models: Models, relay: Relay, server: EdgeServer) -> None:
    """The drafter goes on alone as far as it can, and then the loss is told."""
    with opened(models, relay.endpoint, "local", context=64) as device:
        wish = {**GREEDY, "max_tokens": 1000}
        wanted = wanted_of(device, TEXT, {**wish, "max_tokens": 300})
        for cut_at, alone in ((200, 0), (2, 4)):
            got: list[Piece] = []
            with pytest.raises(EdgeLostError):
                listen(device, relay, wish, got, cut_at)
            origins = [piece.origin for piece in got]
            if alone:
                assert origins[-alone:] == ["local"] * alone
            else:
                assert "local" not in origins
                assert tokens_of(got)[:300] == wanted[: len(tokens_of(got))]
            with pytest.raises(EdgeLostError):
                device.generate("abcd" * 40, protocol="greedy")
            relay.turn_to(server.endpoint)
            await_true(lambda: device.link_up)
            device.generate(TEXT, protocol="greedy", max_tokens=1)


def listen(
    device: Device, relay: Relay, wish: dict[str, Any], got: list[Piece], cut_at: int
) -> None:
    """Take the pieces of an answer; after so many the edge is gone."""
    for piece in device.stream(TEXT, **wish):
        got.append(piece)
        if len(got) == cut_at:
            lose(relay)


# Other edges


def test_redirected_to_another_vocabulary_and_back(
    models: Models, server: EdgeServer, other_server: EdgeServer
) -> None:
    with opened(models, other_server.endpoint) as device:
        there = device.generate(TEXT, **GREEDY).text
    with opened(models, server.endpoint, lanes=2) as device, device.beside() as beside:
        here = device.generate(TEXT, **GREEDY).text
        evidence = device.evidence
        prompt = device.prompt(TEXT)
        ids = device.prompt(device.tokenizer.encode(TEXT))
        assert here != there
        for endpoint, text in ((other_server.endpoint, there), (server.endpoint, here)) * 2:
            device.redirect(endpoint)
            # what was made of words is made anew, before or after the edge was met
            assert device.generate(prompt, **GREEDY).text == text
            assert device.generate(TEXT, **GREEDY).text == text
            assert beside.generate(prompt, **GREEDY).text == text
            assert device.prompt(TEXT).vocabulary == beside.prompt(TEXT).vocabulary
            assert device.tokenizer.decode(device.last.tokens) == text
            assert (device.evidence is evidence) == (text == here)
            assert beside.evidence is device.evidence
            if text == there:
                with pytest.raises(PairMismatchError, match="make the prompt again"):
                    device.generate(ids, **GREEDY)
            else:
                assert device.generate(ids, **GREEDY).tokens


def test_under_local_another_vocabulary_is_learned_before_anything_is_said(
    models: Models, server: EdgeServer, other_server: EdgeServer, strange_server: EdgeServer
) -> None:
    with opened(models, server.endpoint, "local") as device:
        device.generate(TEXT, **GREEDY)
        for edge, protocol in ((other_server, "greedy"), (strange_server, "local")):
            device.redirect(edge.endpoint)
            got = device.generate(TEXT, **GREEDY)
            assert {record.protocol for record in got.rounds} == {protocol}


def test_ids_are_never_taken_for_those_of_another_vocabulary(
    models: Models, server: EdgeServer, other_server: EdgeServer
) -> None:
    with opened(models, server.endpoint) as device:
        device.redirect(other_server.endpoint)
        with pytest.raises(PairMismatchError):  # they were given before it was met
            device.generate([1, 2, 3], **GREEDY)
        assert device.generate([1, 2, 3], **GREEDY).tokens


def test_what_was_learned_is_the_pairs(
    models: Models, server: EdgeServer, other_server: EdgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish: dict[str, Any] = {"protocol": "dsd", "temperature": 1.0, "max_tokens": 40}
    with opened(models, server.endpoint) as device:
        learning: list[tuple[str, Evidence]] = []
        add = Evidence.add

        def noted(self: Evidence, *what: Any) -> None:
            learning.append((device.prompt(TEXT).vocabulary, self))
            add(self, *what)

        monkeypatch.setattr(Evidence, "add", noted)
        for edge in (server, other_server, server, other_server):
            device.redirect(edge.endpoint)
            device.generate(TEXT, **wish)
            assert learning[-1][1] is device.evidence
        told = [vocabulary for vocabulary, _ in learning[-4:]]
        assert told[:2] == told[2:]
        assert told[0] != told[1]
        assert len({id(evidence) for _, evidence in learning}) == 2


@pytest.mark.parametrize("policy", ["wait", "local"])
def test_a_device_that_is_there_before_its_edge(
    models: Models, relay: Relay, server: EdgeServer, policy: str, empty_cache: Path
) -> None:
    relay.turn_to(NOWHERE)
    heard: list[tuple[int, int]] = []
    with opened(models, relay.endpoint, policy, on_fetch=lambda *at: heard.append(at)) as device:
        prompt = device.prompt(TEXT)
        if policy == "local":
            alone = device.generate(prompt, **GREEDY)
            assert {record.protocol for record in alone.rounds} == {"local"}
        coming = threading.Timer(0.3, relay.turn_to, [server.endpoint])
        coming.start()
        if policy == "local":
            coming.join()
            await_true(lambda: device.link_up)
            device.generate(prompt, max_tokens=1)  # in which the edge is greeted
        got = device.generate(prompt, **GREEDY)
        coming.join()
        assert {record.protocol for record in got.rounds} == {"greedy"}
        assert got.tokens == wanted_of(device, TEXT, GREEDY)
        size = len(Vocabulary.of(Artifact.open(models.target)).encode())
        assert heard == [(size, size)]


def test_a_vocabulary_is_fetched_once(
    models: Models, server: EdgeServer, other_server: EdgeServer, empty_cache: Path
) -> None:
    heard: list[tuple[int, int]] = []

    def open_(edge: EdgeServer) -> Device:
        return opened(models, edge.endpoint, lanes=2, on_fetch=lambda *at: heard.append(at))

    with open_(server) as device:
        assert len(heard) == 1
        with device.beside() as beside:
            beside.generate(TEXT, **GREEDY)
        device.generate(TEXT, **GREEDY)
        device.redirect(other_server.endpoint)
        device.generate(TEXT, **GREEDY)
        assert len(heard) == 2
        device.redirect(server.endpoint)
        device.generate(TEXT, **GREEDY)
        assert len(heard) == 2
    with open_(server) as device:  # as after a restart
        device.generate(TEXT, **GREEDY)
    assert len(heard) == 2
    assert len([*(empty_cache / "vocabularies").iterdir()]) == 2
    assert len([*(empty_cache / "bridges").iterdir()]) == 2


# Edges that do not suit


@pytest.fixture
def liar(pair: conftest.Pair) -> Iterator[Callable[..., LyingEdge]]:
    """Makes edges that say to have a model, or otherwise, and answer nothing else."""
    edges: list[LyingEdge] = []

    def make(path: Path, **changes: Any) -> LyingEdge:
        vocabulary = Vocabulary.of(Artifact.open(path))
        offer = {
            "vocab_size": vocabulary.vocab_size,
            "eos_ids": vocabulary.eos_ids,
            "tokenizer": vocabulary.fingerprint,
            "vocabulary": vocabulary.digest,
            "vocabulary_bytes": len(vocabulary.encode()),
        }

        def answers(request: m.Request) -> list[Answer]:
            if not isinstance(request, m.Hello):
                return []
            return [[msgspec.structs.replace(edge.welcome(), **{**offer, **changes})]]

        edge = LyingEdge(pair, answers)
        edge.start()
        edges.append(edge)
        return edge

    yield make
    for edge in edges:
        edge.stop()


HANDS_OUT_NOTHING = {"vocabulary": "", "vocabulary_bytes": 0}


@pytest.mark.parametrize("policy", ["fail", "wait"])
def test_an_edge_that_hands_out_no_vocabulary_is_refused(
    models: Models, liar: Callable[..., LyingEdge], policy: str, empty_cache: Path
) -> None:
    edge = liar(models.target, **HANDS_OUT_NOTHING)
    with (
        pytest.raises(PairMismatchError, match="does not hand it out"),
        opened(models, edge.endpoint, policy) as device,
    ):
        device.generate(TEXT, **GREEDY)
    assert {type(request) for request in edge.requests} <= {m.Hello, m.Close}


@pytest.mark.parametrize("changes", [HANDS_OUT_NOTHING, {}], ids=["nothing", "a stranger"])
def test_no_token_reaches_an_edge_of_another_vocabulary(
    models: Models,
    liar: Callable[..., LyingEdge],
    changes: dict[str, Any],
    strange_server: EdgeServer,
    empty_cache: Path,
) -> None:
    """Done without it, the drafter speaks its own tokens, and they are nobody else's business."""
    if not changes:
        with pytest.raises(PairMismatchError, match="no token"):
            opened(models, strange_server.endpoint)
        path = empty_cache / "vocabularies"
        assert len([*path.iterdir()]) == 1
    edge = liar(models.strange if not changes else models.target, **changes)
    with opened(models, edge.endpoint, "local") as device:
        await_true(lambda: bool(edge.requests))
        for _ in range(2):
            got = device.generate(TEXT, **GREEDY)
            assert {record.protocol for record in got.rounds} == {"local"}
            assert got.text == device.tokenizer.decode(got.tokens)
        assert (
            device.tokenizer.fingerprint
            == Artifact.open(models.draft).manifest.tokenizer_fingerprint
        )
        with Device(models.draft, threads=1) as alone:
            assert alone.generate(TEXT, **{**GREEDY, "protocol": "local"}).tokens == got.tokens
    assert {type(request) for request in edge.requests} <= {m.Hello, m.Cancel, m.Close, m.Ping}


def test_a_lane_that_cannot_be_opened_leaves_nothing_behind(
    models: Models, server: EdgeServer, strange_server: EdgeServer
) -> None:
    with opened(models, server.endpoint, lanes=2) as device:
        wanted = device.generate(TEXT, **GREEDY).tokens
        device.redirect(strange_server.endpoint)
        with pytest.raises(PairMismatchError):
            device.beside()
        assert len(device._family._links) == 1
        device.redirect(server.endpoint)
        with device.beside() as other:
            assert other.generate(TEXT, **GREEDY).tokens == wanted
        assert device.generate(TEXT, **GREEDY).tokens == wanted


def test_an_older_edge(models: Models, liar: Callable[..., LyingEdge]) -> None:
    """It says nothing of its vocabulary: that is the device's, or it refuses the device."""
    old = {"tokenizer": "", **HANDS_OUT_NOTHING}
    edge = liar(models.draft, **old)
    with opened(models, edge.endpoint) as device:
        assert device.tokenizer.fingerprint == device.prompt(TEXT).vocabulary
        assert device.prompt(TEXT).own.tolist() == device.prompt(TEXT).ids.tolist()
    assert not any(isinstance(request, m.Fetch) for request in edge.requests)


# While it is fetched


def test_a_fetch_can_be_interrupted_and_shows_that_it_lives(
    models: Models, server: EdgeServer, liar: Callable[..., LyingEdge], empty_cache: Path
) -> None:
    edge = liar(models.other)  # leaves what is asked for a part unanswered
    with opened(models, server.endpoint, "wait") as device:
        wanted = device.generate(TEXT, **GREEDY).tokens
        device.redirect(edge.endpoint)
        ended: list[BaseException] = []

        def ask() -> None:
            try:
                device.generate(TEXT, **GREEDY)
            except BaseException as error:
                ended.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        await_true(lambda: any(isinstance(each, m.Fetch) for each in edge.requests))
        for _ in range(3):
            before = device.looked_s
            await_true(lambda at=before: device.looked_s > at)
        device.interrupt()
        asking.join(20)
        assert [type(error) for error in ended] == [InterruptedGenerationError]
        device.redirect(server.endpoint)
        assert device.generate(TEXT, **GREEDY).tokens == wanted


def test_an_edge_that_goes_away_in_the_middle_of_a_fetch(
    models: Models, relay: Relay, other_server: EdgeServer, empty_cache: Path
) -> None:
    """Under `local` the answer is the drafter's; when the edge is back the rest is fetched."""
    with opened(models, relay.endpoint, "local") as device:
        device.generate(TEXT, **GREEDY)
        deaf = Deaf(relay)
        device._partners._progress = deaf
        relay.turn_to(other_server.endpoint)
        relay.cut()
        with suppress(AccessDeniedError):
            device.generate(TEXT, max_tokens=1, protocol="greedy")
        await_true(lambda: device.link_up)
        for _ in range(3):
            got = device.generate(TEXT, **GREEDY)
        assert {record.protocol for record in got.rounds} == {"greedy"}
        assert got.tokens == wanted_of(device, TEXT, GREEDY)


class Deaf:
    """Cuts the link when the first part is there."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.heard = 0

    def __call__(self, done: int, total: int) -> None:
        self.heard += 1
        self._relay.cut()


def test_a_prompt_of_this_device_knows_what_it_is(models: Models, server: EdgeServer) -> None:
    messages = [
        {"role": "system", "content": "abc"},
        {"role": "user", "content": "da"},
        {"role": "assistant", "content": "cab"},
        {"role": "user", "content": "d"},
    ]
    with opened(models, server.endpoint) as device:
        prompt = device.prompt(messages)
        assert isinstance(prompt, Prompt)
        assert device.tokenizer.decode(prompt.ids.tolist()) == "abcdaacabda"  # no "s", no "u"
        got = device.generate(prompt, **GREEDY)
        assert got.prompt_tokens == len(prompt.ids)
        assert got.tokens == wanted_of(device, messages, GREEDY)
        again = [*messages, {"role": "assistant", "content": got.text}]
        assert device.shared(device.prompt(again)) >= len(prompt) - 1


def test_a_target_with_the_same_tokens_has_its_own_template(models: Models, tmp_path: Path) -> None:
    """A base drafter does not know how to chat, and its target does."""
    tiny_artifact(tmp_path / "base", tokens=THEIRS, eos="<end of target>", context=CONTEXT)
    _change(tmp_path / "base", chat_template=None)
    with (
        EdgeServer(models.target, threads=1) as edge,
        Device(tmp_path / "base", edge.endpoint, threads=1) as device,
    ):
        prompt = device.prompt(TEXT)
        assert device.template is not None
        text = device.template.render([{"role": "user", "content": TEXT}])
        assert prompt.ids.tolist() == device.tokenizer.encode(text, special=True)
        assert prompt.ids.tolist() != device.tokenizer.encode(TEXT)
        assert prompt.own is prompt.ids  # the bridge is trivial
        wanted = device.generate(TEXT, protocol="stream", max_tokens=40).tokens
        assert device.generate(TEXT, protocol="greedy", max_tokens=40).tokens == wanted


def test_a_prompt_that_was_made_for_another_drafter_is_read_anew(
    models: Models, server: EdgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []
    start = Drafter.start

    def noted(self: Drafter, prompt: Prompt) -> None:
        read.append(prompt.own.tolist())
        start(self, prompt)

    monkeypatch.setattr(Drafter, "start", noted)
    with (
        opened(models, server.endpoint) as device,
        Device(models.target, server.endpoint, threads=1) as akin,
    ):
        ids = device.tokenizer.encode("abcd cabd", special=True)
        for asked in (TEXT, ids):
            made, foreign = device.prompt(asked), akin.prompt(asked)
            assert made.vocabulary == foreign.vocabulary
            assert made.own.tolist() != foreign.own.tolist()
            device.generate(foreign, protocol="greedy", max_tokens=1)
            assert read[-1] == made.own.tolist()


def test_a_prompt_is_said_anew_in_another_template(
    models: Models, server: EdgeServer, tmp_path: Path
) -> None:
    tiny_artifact(tmp_path / "tuned", tokens=THEIRS, eos="<end of target>", context=CONTEXT)
    _change(tmp_path / "tuned", chat_template="{{ messages[0].content }}abab")
    with (
        EdgeServer(tmp_path / "tuned", threads=1) as tuned,
        Device(models.target, server.endpoint, threads=1) as device,
    ):
        prompt = device.prompt(TEXT)
        device.redirect(tuned.endpoint)
        device.generate([1, 2], protocol="greedy", max_tokens=1)  # in which the edge is greeted
        got = device.generate(prompt, protocol="greedy", max_tokens=1)
        assert got.prompt_tokens == len(device.prompt(TEXT)) != len(prompt)


def test_the_first_prompt_is_said_in_the_template_of_an_edge_that_comes_late(
    models: Models, relay: Relay, server: EdgeServer, tmp_path: Path
) -> None:
    tiny_artifact(tmp_path / "base", tokens=THEIRS, eos="<end of target>", context=CONTEXT)
    _change(tmp_path / "base", chat_template=None)
    relay.turn_to(NOWHERE)
    with Device(tmp_path / "base", relay.endpoint, threads=1, on_link_loss="wait") as device:
        coming = threading.Timer(0.2, relay.turn_to, [server.endpoint])
        coming.start()
        messages = [{"role": "user", "content": TEXT}]
        got = device.generate(messages, protocol="greedy", max_tokens=4)
        coming.join()
        assert got.prompt_tokens == len(device.prompt(messages))


def test_what_is_shared_with_a_prompt_of_another_vocabulary_is_nothing(
    models: Models, server: EdgeServer, other_server: EdgeServer
) -> None:
    with opened(models, server.endpoint) as device, opened(models, other_server.endpoint) as other:
        ids = [0, 1, 2]
        device.generate(ids, protocol="greedy", max_tokens=1)
        assert device.shared(device.prompt(ids)) == len(ids)
        assert device.shared(other.prompt(ids)) == 0


def test_a_vocabulary_with_nothing_in_common_is_looked_at_once(
    models: Models, strange_server: EdgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    decode = Vocabulary.decode

    def noted(data: bytes, model: str) -> Vocabulary:
        decoded.append(model)
        return decode(data, model)

    monkeypatch.setattr(Vocabulary, "decode", noted)
    with opened(models, strange_server.endpoint, "local") as device:
        for _ in range(3):
            assert device.generate(TEXT, protocol="greedy", max_tokens=2).tokens
        assert len(decoded) == 1
    with pytest.raises(PairMismatchError, match="cannot draft for"):
        opened(models, strange_server.endpoint)


def test_ever_new_vocabularies_do_not_fill_the_memory(
    models: Models, server: EdgeServer, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    own = vocabulary(["a", "b"], "<end>")
    arriving = [vocabulary(["a", letter], "<end>") for letter in "cdefghij"]
    with opened(models, server.endpoint) as device:
        link, welcome = device._link, device.welcome
        assert link is not None
        assert welcome is not None
        partners = Partners(own, {1: 0.01}, 64, None)
        pairs: list[weakref.ref[Pair]] = []
        for it in arriving:
            monkeypatch.setattr("device_runtime.partners.target_vocabulary", lambda *_, it=it: it)
            told = msgspec.structs.replace(
                welcome, vocabulary=it.digest, tokenizer=it.fingerprint, vocab_size=it.vocab_size
            )
            partner = partners.meet(link, told)
            assert partners.meet(link, told) is partner
            pairs.append(weakref.ref(partner.pair))
            del partner
        gc.collect()
        assert [pair() is not None for pair in pairs] == [False] * 5 + [True] * 3
