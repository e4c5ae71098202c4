"""Devices without a model, on real edges: the text is `stream`'s, and the text drafts it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import EdgeUnreachableError, UnsupportedError
from pilotfish.speculation.logits_options import Grammar
from tests.conftest import Pair
from tests.support.daemons import free_port
from tests.support.relay import Relay
from tests.support.serving import chat, serving
from tests.support.tiny import tiny_artifact
from tests.support.writing import OBJECT, writers

assert writers  # a fixture

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3, 5]]
EXACT: list[dict[str, Any]] = [
    {"protocol": "greedy", "temperature": 0.0, "window": 4},
    {"protocol": "greedy", "temperature": 0.0, "window": "auto"},
    {"protocol": "coupled", "temperature": 1.0, "window": 4},
    {"protocol": "coupled", "temperature": 0.7, "window": "auto"},
    {"protocol": "ahead", "temperature": 0.0},
    {"protocol": "ahead", "temperature": 1.0, "hints": "device"},
]
SAMPLED: list[dict[str, Any]] = [
    {"protocol": "dsd", "window": 3},
    {"protocol": "tslt", "window": "auto"},
    {"protocol": "tree", "expansion": (2, 2, 1)},
    {"protocol": "dssd", "window": 2},
    {"protocol": "adaptive", "window": 3, "tau": 0.5},
    {"protocol": "auto"},
    {"protocol": "stream"},
]


@pytest.fixture(scope="module")
def target(long_pair: Pair) -> Path:
    return long_pair.target


@pytest.fixture(scope="module")
def server(target: Path) -> Iterator[EdgeServer]:
    with EdgeServer(target, threads=1) as opened:
        yield opened


def streamed(device: Device, prompt: Any, wish: dict[str, Any]) -> list[int]:
    selection = {name: wish[name] for name in ("temperature", "seed", "max_tokens")}
    return device.generate(prompt, protocol="stream", **selection).tokens


@pytest.mark.parametrize("texts", [None, "off", "a folder"])
def test_the_text_is_that_of_stream(server: EdgeServer, texts: Any, tmp_path: Path) -> None:
    """The second time what was said before is known, unless earlier texts are off."""
    texts = tmp_path / "texts" if texts == "a folder" else texts
    with (
        Device("text", server.endpoint, texts="off") as plain,
        Device("text", server.endpoint, texts=texts) as device,
    ):
        for wish in EXACT:
            accepted = []
            for seed, prompt in enumerate(PROMPTS):
                whole = {**wish, "seed": seed, "max_tokens": 60}
                wanted = streamed(plain, prompt, whole)
                for _ in range(2):
                    answer = device.generate(prompt, **whole)
                    assert answer.tokens == wanted
                accepted.append(sum(each.accepted for each in answer.rounds))
            # of 60; under `ahead` a tiny target is often faster than any hint
            if texts != "off" and wish["protocol"] != "ahead":
                assert min(accepted) > 25, wish


@pytest.mark.parametrize("wish", SAMPLED, ids=lambda wish: wish["protocol"])
def test_every_protocol_answers(server: EdgeServer, wish: dict[str, Any]) -> None:
    with Device("text", server.endpoint) as device:
        for seed in range(3):
            options = {"temperature": 1.0, **wish, "seed": seed, "max_tokens": 40}
            assert len(device.generate(PROMPTS[0], **options).tokens) == 40


def test_a_model_with_text_says_what_stream_says(long_pair: Pair, server: EdgeServer) -> None:
    with Device(long_pair.draft, server.endpoint, threads=1, draft_text=True, lanes=2) as device:
        for wish in EXACT:
            whole = {**wish, "seed": 5, "max_tokens": 50}
            wanted = streamed(device, PROMPTS[0], whole)
            for _ in range(2):
                answer = device.generate(PROMPTS[0], **whole)
                assert answer.tokens == wanted
            if wish["protocol"] != "ahead":
                assert sum(each.accepted for each in answer.rounds) > 10
        with device.beside() as other, pytest.raises(UnsupportedError, match="All 2 lanes"):
            other.beside()


def test_lanes_say_what_each_would_say_alone(server: EdgeServer, tmp_path: Path) -> None:
    """Several at once, which search and add to the same texts."""
    wishes = [{**wish, "seed": 3, "max_tokens": 60} for wish in EXACT]
    with Device("text", server.endpoint, lanes=1, texts=tmp_path) as device:
        lanes = [device, *(device.beside() for _ in range(2))]
        wanted = [[streamed(device, prompt, wish) for wish in wishes] for prompt in PROMPTS]
        got: list[list[list[int]]] = [[] for _ in lanes]

        def talk(at: int) -> None:
            for wish in wishes:
                got[at].append(lanes[at].generate(PROMPTS[at], **wish).tokens)

        threads = [threading.Thread(target=talk, args=(at,)) for at in range(len(lanes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == wanted
        # what one has said, the others know
        answer = lanes[2].generate(PROMPTS[0], **wishes[0])
        assert sum(each.accepted for each in answer.rounds) > 35
        for lane in lanes[1:]:
            lane.close()


@pytest.mark.parametrize("texts", ["off", None])
def test_off_is_as_if_nothing_had_been_said_before(server: EdgeServer, texts: Any) -> None:
    """Neither in this lane nor in another; each answer takes the rounds of the first."""
    wish = {**EXACT[0], "seed": 1, "max_tokens": 60}
    rounds = []
    with (
        Device("text", server.endpoint, texts=texts, lanes=2) as device,
        device.beside() as other,
    ):
        for lane in (device, device, other, other):
            answer = lane.generate(PROMPTS[1], **wish)
            rounds.append([(each.nodes, each.accepted) for each in answer.rounds])
    assert [each == rounds[0] for each in rounds[1:]] == [texts == "off"] * 3


def test_texts_are_known_to_the_next_device(server: EdgeServer, tmp_path: Path) -> None:
    wish = {**EXACT[0], "seed": 1, "max_tokens": 60, "window": 8}
    rounds = []
    for _ in range(2):  # closed, and opened again in the same process
        with Device("text", server.endpoint, texts=tmp_path / "kept") as device:
            rounds.append(len(device.generate(PROMPTS[1], **wish).rounds))
    assert rounds[1] < rounds[0]
    assert rounds[1] < 15
    with (
        Device("text", server.endpoint, texts=tmp_path / "kept") as device,
        Device("text", server.endpoint, texts=tmp_path / "kept") as other,
    ):
        device.generate(PROMPTS[1], **wish)
        with pytest.raises(UnsupportedError, match="Another device keeps its texts"):
            other.generate(PROMPTS[1], **wish)


def test_a_link_that_breaks_changes_nothing(server: EdgeServer) -> None:
    relay = Relay(server.endpoint)
    with closing(relay), Device("text", relay.endpoint, on_link_loss="wait") as device:
        for wish in EXACT:
            whole = {**wish, "seed": 1, "max_tokens": 60}
            wanted = streamed(device, PROMPTS[2], whole)
            for at, _ in enumerate(device.stream(PROMPTS[2], **whole)):
                if at in (1, 9, 10):
                    relay.cut()
            assert device.last is not None
            assert device.last.tokens == wanted
        assert relay.connections > 6


@pytest.mark.parametrize("draft_text", [False, True])
def test_what_a_grammar_allows_is_that_of_stream(writers: Pair, draft_text: bool) -> None:
    draft = writers.draft if draft_text else "text"
    grammar = Grammar.from_schema(OBJECT)
    with (
        EdgeServer(writers.target, threads=1) as server,
        Device(draft, server.endpoint, threads=1, draft_text=draft_text) as device,
    ):
        for wish in [*EXACT, {"protocol": "tree", "temperature": 0.0, "expansion": (2, 2)}]:
            whole = {**wish, "seed": 2, "max_tokens": 80, "grammar": grammar}
            stream = {"protocol": "stream", "temperature": wish["temperature"]}
            wanted = device.generate(
                PROMPTS[0], **{**stream, "seed": 2}, max_tokens=80, grammar=grammar
            )
            for _ in range(2):
                assert device.generate(PROMPTS[0], **whole).tokens == wanted.tokens


# Other edges


def test_an_edge_of_another_vocabulary_takes_its_place(
    target: Path, server: EdgeServer, tmp_path: Path
) -> None:
    """Nothing of one vocabulary is drafted in the other; back at the first, its texts are known."""
    words = ["D", "B", "A", "E", "BA", "DD", "C"]
    tiny_artifact(tmp_path / "other", tokens=words, seed=2)
    wish = {**EXACT[0], "seed": 1, "max_tokens": 40}
    sampled = {**EXACT[2], "seed": 1, "max_tokens": 40}
    with (
        EdgeServer(tmp_path / "other", threads=1) as second,
        Device("text", server.endpoint, texts=tmp_path / "texts", on_link_loss="wait") as device,
        Device("text", second.endpoint, texts="off") as plain,
    ):
        wanted = device.generate("abc", **wish)
        assert wanted.text
        device.redirect(second.endpoint)
        for each in (wish, sampled, wish, sampled):
            assert device.generate("DAB", **each).text == plain.generate("DAB", **each).text
        device.redirect(server.endpoint)
        again = device.generate("abc", **wish)
        assert again.tokens == wanted.tokens
        assert sum(each.accepted for each in again.rounds) > 20
        with pytest.raises(UnsupportedError, match="needs a model"):
            device.generate("abc", protocol="local")
    assert len(list((tmp_path / "texts").glob("*.texts"))) == 2


def test_an_edge_that_is_away_at_the_start_is_waited_for(target: Path, tmp_path: Path) -> None:
    port = free_port()
    with Device("text", f"tcp://127.0.0.1:{port}", on_link_loss="wait", patience_s=60) as device:
        answers: list[Any] = []
        wish = {**EXACT[0], "seed": 1, "max_tokens": 20}
        waiting = threading.Thread(target=lambda: answers.append(device.generate("abc", **wish)))
        waiting.start()
        time.sleep(0.3)
        assert not answers
        with EdgeServer(target, listen=f"tcp://127.0.0.1:{port}", threads=1):
            waiting.join(60)
            assert len(answers) == 1
            assert len(answers[0].tokens) == 20
    with pytest.raises(EdgeUnreachableError):
        Device("text", f"tcp://127.0.0.1:{port}")


# What it cannot do


def refused(reason: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(UnsupportedError, match=reason) as caught:
        Device(*arguments, **options)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_what_does_not_fit_is_one_sentence(pair: Pair, edge: EdgeServer, tmp_path: Path) -> None:
    alone = "only repeats earlier text"
    refused(alone, "text")
    refused(alone, "text", edge.endpoint, on_link_loss="local")
    refused(
        "Only a drafter that drafts from texts keeps texts", pair.draft, edge.endpoint, texts="off"
    )
    refused("Only a drafter that drafts from texts", pair.draft, edge.endpoint, texts=tmp_path)
    (tmp_path / "file").write_text("")
    refused("name another folder", "text", edge.endpoint, texts=tmp_path / "file")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"protocol": "local"}, "protocol local needs a model"),
        ({"protocol": "wisv-full"}, "without hidden states"),
        ({"protocol": "wisv-selective"}, "without hidden states"),
    ],
)
def test_a_protocol_that_needs_a_model_is_refused(
    edge: EdgeServer, options: dict[str, Any], reason: str
) -> None:
    """The edge has a decision head; the next answer is as if nothing was asked."""
    with Device("text", edge.endpoint) as device:
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=reason):
                device.generate([3, 1, 4], **options)
        assert device.generate([3, 1, 4], protocol="auto", max_tokens=5).tokens
        with pytest.raises(UnsupportedError, match=reason):
            device.generate([3, 1, 4], **options)


# Processes


def test_no_engine_is_needed(server: EdgeServer, tmp_path: Path) -> None:
    """Where ONNX Runtime is not installed."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['onnxruntime'] = None\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pilotfish", "device", "run", "abc", "--draft", "text"]
    command += ["--edge", server.endpoint, "--max-tokens", "12", "--protocol", "greedy"]
    completed = subprocess.run(
        [*command, "--temperature", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert completed.returncode == 0, completed.stderr
    with Device("text", server.endpoint) as device:
        wanted = device.generate("abc", protocol="stream", temperature=0.0, max_tokens=12)
    assert wanted.text.strip() in completed.stdout


def test_the_service_answers_without_a_model(server: EdgeServer, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    flags = ("--texts", folder, "--share-texts", "--lanes", 2)
    with serving(Path("text"), server.endpoint, *flags) as service:
        client = service.client()
        first, second = (chat(client, "abab", max_tokens=30) for _ in range(2))
        assert first.choices[0].message.content
        assert first.choices[0].message.content == second.choices[0].message.content
        assert client.models.list().data
        assert service.get("/status").status_code == 200
    (selection,) = folder.glob("*.texts")
    assert selection.stat().st_size > 120
