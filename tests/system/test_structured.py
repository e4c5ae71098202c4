"""Constrained answers through real edges: what ended is of its grammar, and the text is `stream`'s.

The pair are random models of a vocabulary of pieces of JSON, so that nothing but the grammar makes
them write any.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import BadGrammarError, PilotfishError, UnsupportedError
from pilotfish.speculation.logits_options import Grammar
from pilotfish.wire.protocols import PROTOCOL_REGISTRY
from tests.conftest import Pair
from tests.support.daemons import running
from tests.support.judging import random_head, saved
from tests.support.pass_counter import PassCounter
from tests.support.registered import completed
from tests.support.relay import Relay
from tests.support.tiny import tiny_artifact
from tests.support.writing import OBJECT, PIECES, writers

GRAMMARS: dict[str, tuple[Grammar, str]] = {
    "schema": (Grammar.from_schema(OBJECT), r'\{"ab": \d+, "bad": \[.*\], "x": \w+, "dd": ".*"\}'),
    "regex": (Grammar("regex", "(ab|c{2,4})[0-9]{3}"), "(ab|c{2,4})[0-9]{3}"),
    "choice": (Grammar.from_choices(["abc", "ab 12", 'a"b']), 'abc|ab 12|a"b'),
    "lark": (Grammar("lark", 'start: n ("+" n){1,3}\nn: /[0-9]{1,2}/'), r"\d{1,2}(\+\d{1,2}){1,3}"),
}
assert writers  # a fixture

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [40, 3, 5]]
SAMPLED = {"temperature": 1.0}
LISTED: list[tuple[str, dict[str, Any]]] = [
    ("stream", {}), ("greedy", {}), ("coupled", {**SAMPLED, "window": 3}), ("dsd", SAMPLED),
    ("tslt", {**SAMPLED, "window": "auto"}), ("dssd", SAMPLED), ("ahead", {}), ("ahead", SAMPLED),
    ("tree", {**SAMPLED, "expansion": (2, 2, 1)}), ("tree", {}), ("local", SAMPLED),
    ("adaptive", {**SAMPLED, "tau": 0.8}), ("wisv-full", {"threshold": 1.0}),
    ("wisv-selective", {"threshold": 1.0}), ("auto", {}),
]  # fmt: skip
PROTOCOLS = completed(LISTED, PROTOCOL_REGISTRY)


@pytest.fixture(scope="module")
def edge(writers: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeServer]:
    from pilotfish.engines.artifact import Artifact

    manifests = (Artifact.open(path).manifest for path in writers)
    head = saved(random_head(*manifests, link=None), tmp_path_factory.mktemp("head"))
    with EdgeServer(writers.target, threads=1, head=head, sessions=50) as server:
        yield server


@pytest.fixture(scope="module")
def device(writers: Pair, edge: EdgeServer) -> Iterator[Device]:
    with Device(writers.draft, edge.endpoint, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def across(
    writers: Pair, edge: EdgeServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Device]:
    """A drafter that shares single characters with the target, and not all of them."""
    folder = tmp_path_factory.mktemp("across") / "draft"
    ours = [piece for piece in PIECES if len(piece) == 1 and piece not in "tx5"]
    tiny_artifact(folder, tokens=ours, eos="<other end>", seed=3)
    with Device(folder, edge.endpoint, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize(("protocol", "options"), PROTOCOLS)
def test_an_answer_that_ended_is_of_its_grammar(
    device: Device, kind: str, protocol: str, options: dict[str, Any]
) -> None:
    grammar, pattern = GRAMMARS[kind]
    for seed, prompt in enumerate(PROMPTS):
        requests: dict[str, Any] = {"max_tokens": 120, "seed": seed, **options}
        answer = device.generate(prompt, protocol=protocol, grammar=grammar, **requests)
        assert answer.finish_reason == "stop"
        assert re.fullmatch(pattern, answer.text)
        if kind == "schema":
            payload = json.loads(answer.text)
            assert 0 <= payload["ab"] <= 99
            assert set(payload["bad"]) <= {"ab", "ba", "c"}


@pytest.mark.parametrize(
    ("protocol", "options"),
    [("greedy", {"window": 3}), ("tree", {"expansion": (2, 2, 1)}), ("ahead", {}),
     ("coupled", {**SAMPLED, "window": "auto"}), ("ahead", SAMPLED)],
)  # fmt: skip
def test_the_text_is_that_of_stream(device: Device, protocol: str, options: dict[str, Any]) -> None:
    fields = {"temperature": options.get("temperature", 0.0), "max_tokens": 60}
    for seed, prompt in enumerate(PROMPTS):
        for grammar, _ in GRAMMARS.values():
            requests: dict[str, Any] = {**fields, "seed": seed, "grammar": grammar}
            wanted = device.generate(prompt, protocol="stream", **requests)
            got = device.generate(prompt, protocol=protocol, **{**requests, **options})
            assert (got.tokens, got.finish_reason) == (wanted.tokens, wanted.finish_reason)


def test_penalties_and_bias_go_with_it(device: Device) -> None:
    """They come before the mask, which they cannot lift."""
    options: dict[str, Any] = {"logit_bias": {PIECES.index("e"): 100.0}, "presence_penalty": 2.0}
    for protocol in ("stream", "greedy", "ahead"):
        answer = device.generate(PROMPTS[0], schema=OBJECT, protocol=protocol, **options)
        assert "eee" in json.loads(answer.text)["dd"]


def test_what_is_forced_is_drafted_without_a_pass(writers: Pair, edge: EdgeServer) -> None:
    with Device(writers.draft, edge.endpoint, threads=1) as device:
        passes = PassCounter(device._drafter._shared_model.engine.model)
        only = Grammar("regex", "abcabc12 true null[0-9]")
        answer = device.generate(PROMPTS[0], protocol="greedy", window=8, grammar=only)
        assert answer.text[:-1] == "abcabc12 true null"
        assert sum(each.accepted for each in answer.rounds) == len(answer.tokens) - len(
            answer.rounds
        )
        assert len(passes.counts) <= 3
        assert answer.forced >= sum(each.accepted for each in answer.rounds) - len(passes.counts)


@pytest.mark.parametrize(
    ("protocol", "options", "least"),
    [
        ("greedy", {"window": 6}, 20),
        ("coupled", {**SAMPLED, "window": 6}, 20),
        ("ahead", {"hints": "device"}, 1),  # hints may be late
    ],
)
def test_pieces_tell_what_was_forced(
    device: Device, protocol: str, options: dict[str, Any], least: int
) -> None:
    long = Grammar("regex", '(\\{"ab": [0-9]{2}, "x": (true|null)\\}){8}')
    requests: dict[str, Any] = {"protocol": protocol, "max_tokens": 200, **options}

    def forced(**more: Any) -> int:
        """Return how many tokens an answer's pieces tell to be forced; checks the pieces."""
        pieces = [*device.stream(PROMPTS[1], **{**requests, **more})]
        answer = device.last
        assert answer is not None
        assert [id for piece in pieces for id in piece.tokens] == answer.tokens
        assert "".join(piece.text for piece in pieces) == answer.text
        result = [piece for piece in pieces if piece.origin == "forced"]
        assert sum(len(piece.tokens) for piece in result) == answer.forced
        # only what the grammar leaves one of: of digits, the zeros of \\u0012 in a text
        assert not any(re.search("[1-9]", piece.text) for piece in result)
        return answer.forced

    for grammar in (Grammar.from_schema(OBJECT), long):
        assert any(forced(grammar=grammar) >= least for _ in range(20))
    assert forced(max_tokens=40) == 0


def test_an_edge_that_lost_the_session_goes_on_in_the_same_state(
    writers: Pair, edge: EdgeServer
) -> None:
    relay = Relay(edge.endpoint)
    long = Grammar("regex", '(\\{"ab": [0-9]{2}, "x": (true|null)\\}){12}')
    for protocol, options in (("greedy", {}), ("ahead", SAMPLED), ("dssd", SAMPLED)):
        requests: dict[str, Any] = {"max_tokens": 300, "seed": 1, "grammar": long, **options}
        with Device(writers.draft, relay.endpoint, threads=1) as device:
            wanted = device.generate(PROMPTS[1], protocol="stream", **requests)
            lines: list[int] = []
            for piece in device.stream(PROMPTS[1], protocol=protocol, **requests):
                if any(len(lines) < at <= len(lines) + len(piece.tokens) for at in (10, 40)):
                    relay.cut()
                lines += piece.tokens
            assert device.last is not None
            assert device.last.recoveries
            assert re.fullmatch(long.text, device.last.text)
            assert protocol == "dssd" or lines == wanted.tokens
    relay.close()


def test_the_drafter_alone_keeps_to_it_while_the_edge_is_away(
    writers: Pair, edge: EdgeServer
) -> None:
    relay = Relay(edge.endpoint)
    long = Grammar("regex", '(\\{"ab": [0-9]{2}, "x": (true|null)\\}){12}')
    with Device(writers.draft, relay.endpoint, threads=1, on_link_loss="local") as device:
        reply = 0
        requests: dict[str, Any] = {"protocol": "greedy", "max_tokens": 400, "grammar": long}
        for piece in device.stream(PROMPTS[1], **requests):
            if reply < 30 <= reply + len(piece.tokens):
                relay.turn_to("tcp://127.0.0.1:1")
                relay.cut()
            reply += len(piece.tokens)
        assert device.last is not None
        assert re.fullmatch(long.text, device.last.text)
    relay.close()


def test_a_drafter_beside_the_target_keeps_to_it(writers: Pair) -> None:
    flags = ("--target", writers.target, "--threads", 1, "--draft", writers.target)
    with running(*flags) as edge, Device(writers.draft, edge.endpoint, threads=1) as device:
        requests: dict[str, Any] = {"schema": OBJECT, "max_tokens": 100, "seed": 3, **SAMPLED}
        wanted = device.generate(PROMPTS[0], protocol="stream", **requests)
        got = device.generate(PROMPTS[0], protocol="ahead", hints="edge", **requests)
    assert got.tokens == wanted.tokens
    rounds = [each for each in got.rounds if each.source == "edge"]
    assert sum(each.accepted for each in rounds) == sum(each.window for each in rounds)


def test_an_answer_that_is_cut_off_says_so(device: Device) -> None:
    whole = device.generate(PROMPTS[0], protocol="greedy", schema=OBJECT, max_tokens=100)
    cut = device.generate(PROMPTS[0], protocol="greedy", schema=OBJECT, max_tokens=7)
    assert cut.finish_reason == "length"
    assert whole.text.startswith(cut.text)


# Refusals


@pytest.mark.parametrize("protocol", ["stream", "greedy", "ahead", "local"])
@pytest.mark.parametrize(
    "grammar", [Grammar("json", "{"), Grammar("regex", "("), Grammar("verse", "")]
)
def test_what_is_no_grammar(device: Device, protocol: str, grammar: Grammar) -> None:
    with pytest.raises(BadGrammarError):
        device.generate(PROMPTS[0], protocol=protocol, grammar=grammar, max_tokens=4)
    assert device.generate(PROMPTS[0], protocol=protocol, max_tokens=4).tokens


def test_a_dead_end_harms_the_answer_alone(device: Device) -> None:
    with pytest.raises(BadGrammarError, match="No token"):
        device.generate(PROMPTS[0], protocol="greedy", grammar=Grammar("regex", "a[é]"))
    assert device.generate(PROMPTS[0], protocol="greedy", max_tokens=4).tokens


@pytest.mark.parametrize(
    ("protocol", "options"),
    [("greedy", {"window": 4}), ("tree", {"expansion": (3, 2)}), ("ahead", {}),
     ("coupled", SAMPLED), ("ahead", SAMPLED)],
)  # fmt: skip
def test_a_draft_into_a_dead_end_changes_nothing(
    writers: Pair, edge: EdgeServer, protocol: str, options: dict[str, Any]
) -> None:
    """The drafter likes what the target's vocabulary cannot end; the target does not."""
    grammar = Grammar("regex", "aé|b[0-9]{3}")
    likes = {"logit_bias": {PIECES.index("a"): 0.0}}
    with Device(writers.draft, edge.endpoint, threads=1) as device:
        for seed in range(6):
            requests: dict[str, Any] = {"seed": seed, "max_tokens": 20, "grammar": grammar, **likes}
            requests |= options
            wanted = outcome(device, {**requests, "protocol": "stream", "window": None,
                                      "expansion": None})  # fmt: skip
            assert outcome(device, {**requests, "protocol": protocol}) == wanted


def outcome(device: Device, options_value: dict[str, Any]) -> list[int] | str:
    try:
        return device.generate(PROMPTS[0], **options_value).tokens
    except BadGrammarError as error:
        return str(error)


@pytest.mark.parametrize("alone", [False, True])
def test_a_drafter_alone_never_says_what_is_forbidden(
    writers: Pair, edge: EdgeServer, alone: bool
) -> None:
    relay = Relay(edge.endpoint)
    grammar = Grammar("regex", "[abc]{30}é")
    policy: dict[str, Any] = {"on_link_loss": "local"}
    with Device(writers.draft, relay.endpoint, threads=1, **policy) as device:
        text = ""
        with pytest.raises(BadGrammarError):  # noqa: PT012  # raised while the stream is read
            requests: dict[str, Any] = {"max_tokens": 31, "grammar": grammar}
            for piece in device.stream(
                PROMPTS[0], protocol="local" if alone else "greedy", **requests
            ):
                if not text and not alone:
                    relay.turn_to("tcp://127.0.0.1:1")
                    relay.cut()
                text += piece.text
        assert set(text) <= set("abc")
    relay.close()


def test_others_keep_the_edges_drafter(writers: Pair) -> None:
    flags = ("--target", writers.target, "--threads", 1, "--draft", writers.target)
    with (
        running(*flags) as edge,
        Device(writers.draft, edge.endpoint, threads=1) as honest,
        Device(writers.draft, edge.endpoint, threads=1) as hostile,
    ):
        requests: dict[str, Any] = {"protocol": "ahead", "hints": "edge", **SAMPLED}
        done = threading.Event()

        def bother() -> None:
            while not done.is_set():
                with suppress(BadGrammarError):
                    hostile.generate(PROMPTS[1], grammar=Grammar("regex", "[abc]{3}é"), **requests)

        thread = threading.Thread(target=bother)
        thread.start()
        try:
            plain = {"logit_bias": {len(PIECES): -100.0}, "max_tokens": 150}
            answer = honest.generate(PROMPTS[0], seed=1, **plain, **requests)
        finally:
            done.set()
            thread.join()
    assert answer.hints["edge"][1] > 40


@pytest.mark.parametrize("kind", ["schema", "choice"])
@pytest.mark.parametrize(
    ("protocol", "options"),
    [("greedy", {}), ("tree", {**SAMPLED, "expansion": (2, 2)}), ("ahead", {}), ("dsd", SAMPLED),
     ("tslt", SAMPLED), ("coupled", SAMPLED), ("ahead", SAMPLED)],
)  # fmt: skip
def test_across_a_bridge_with_few_shared_tokens(
    across: Device, kind: str, protocol: str, options: dict[str, Any]
) -> None:
    grammar, pattern = GRAMMARS[kind]
    for seed, prompt in enumerate(PROMPTS):
        requests: dict[str, Any] = {"seed": seed, "max_tokens": 120, "grammar": grammar, **options}
        answer = across.generate(prompt, protocol=protocol, **requests)
        assert re.fullmatch(pattern, answer.text)
        if protocol in ("greedy", "ahead", "coupled"):
            requests = {**requests, "protocol": "stream"}
            assert answer.tokens == across.generate(prompt, **requests).tokens


def test_a_drafter_that_cannot_say_it_alone(across: Device) -> None:
    with pytest.raises(BadGrammarError, match="no token that the grammar allows"):
        across.generate(PROMPTS[0], protocol="local", grammar=Grammar("regex", "true"))


def test_a_schema_and_a_grammar(device: Device) -> None:
    with pytest.raises(UnsupportedError, match="not both"):
        device.generate(PROMPTS[0], protocol="greedy", schema=OBJECT, grammar=GRAMMARS["lark"][0])


def test_a_grammar_that_is_too_long(device: Device) -> None:
    with pytest.raises(PilotfishError, match="bytes"):
        device.generate(PROMPTS[0], grammar=Grammar("regex", "a" * 70_000), protocol="stream")


def test_a_device_without_the_library_drafts_what_it_likes(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pilotfish.engines.engine_errors import GrammarError
    from pilotfish.engines.grammar import Grammars

    def missing(self: Grammars, grammar: Grammar) -> None:
        raise GrammarError("not here")

    requests: dict[str, Any] = {"schema": OBJECT, "max_tokens": 100}
    wanted = device.generate(PROMPTS[0], protocol="stream", **requests)
    monkeypatch.setattr(Grammars, "constraint", missing)
    for protocol in ("greedy", "ahead"):
        assert device.generate(PROMPTS[0], protocol=protocol, **requests).tokens == wanted.tokens
