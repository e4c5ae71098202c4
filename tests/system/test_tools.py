"""Calls and thoughts through real edges: whatever the protocol, the text is `stream`'s."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Device, EdgeServer, Talk
from pilotfish.base.errors import UnsupportedError
from pilotfish.engines.chat_formats import Tools
from pilotfish.export.model import export_model
from tests.conftest import Pair
from tests.support.calling import CALLER_PIECES, TOOLS, callers, tool
from tests.support.registered import LOSSLESS, completed
from tests.support.tiny import RandomSource, tiny_artifact, tiny_config

assert callers  # a fixture
SAMPLED = {"temperature": 1.0}
PROTOCOLS: list[tuple[str, dict[str, Any]]] = [
    ("greedy", {}), ("greedy", {"window": 9}), ("coupled", {**SAMPLED, "window": 3}),
    ("ahead", {}), ("ahead", SAMPLED), ("auto", {}),
]  # fmt: skip
LISTED: list[tuple[str, dict[str, Any]]] = [
    ("tslt", SAMPLED), ("dssd", SAMPLED), ("tree", {**SAMPLED, "expansion": (2, 2, 1)}),
    ("dsd", SAMPLED), ("local", SAMPLED), ("adaptive", {**SAMPLED, "tau": 0.8}),
]  # fmt: skip
COMPARED = {name for name, _ in PROTOCOLS}
LAWFUL = completed(LISTED, [name for name in LOSSLESS if name not in COMPARED])
SAID = [{"role": "user", "content": "move here"}]
THOUGHT_ENDS = {CALLER_PIECES.index("</think>"): 100.0}


@pytest.fixture(scope="module")
def edge(callers: Pair) -> Iterator[EdgeServer]:
    with EdgeServer(callers.target, threads=1) as server:
        yield server


@pytest.fixture(scope="module")
def device(callers: Pair, edge: EdgeServer) -> Iterator[Device]:
    with Device(callers.draft, edge.endpoint, threads=1) as opened:
        yield opened


def called(answer: Any) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.turn.calls]


@pytest.mark.parametrize(("protocol", "options"), PROTOCOLS)
@pytest.mark.parametrize("choice", ["auto", "required", "move"])
def test_calls_are_those_of_stream(
    device: Device, choice: str, protocol: str, options: dict[str, Any]
) -> None:
    for seed in range(3):
        requests: dict[str, Any] = {
            "tools": TOOLS, "tool_choice": choice, "max_tokens": 150, "seed": seed,
            "temperature": options.get("temperature", 0.0), "parallel_tool_calls": False,
        }  # fmt: skip
        wanted = device.generate(SAID, protocol="stream", **requests)
        answer = device.generate(SAID, protocol=protocol, **{**requests, **options})
        assert answer.tokens == wanted.tokens
        assert answer.text == wanted.text
        if choice != "auto":
            ((name, arguments),) = called(answer)
            assert arguments == ({"to": arguments["to"]} if name == "move" else {})
            assert choice in ("required", name)
            assert answer.turn.content == ""


@pytest.mark.parametrize(("protocol", "options"), LAWFUL)
def test_calls_are_of_their_schema(device: Device, protocol: str, options: dict[str, Any]) -> None:
    for seed in range(3):
        requests: dict[str, Any] = {"seed": seed, "max_tokens": 150, **options}
        answer = device.generate(
            SAID, protocol=protocol, tools=TOOLS, tool_choice="required",
            parallel_tool_calls=False, **requests,
        )  # fmt: skip
        ((name, arguments),) = called(answer)
        assert arguments in ([{"to": "here"}, {"to": "there"}] if name == "move" else [{}])


def test_parts_come_as_they_are_written(device: Device) -> None:
    pieces = [
        piece
        for piece in device.stream(
            SAID, protocol="greedy", tools=TOOLS, tool_choice="move", max_tokens=150
        )
        if piece.parts
    ]
    assert device.last is not None
    parts = [part for piece in pieces for part in piece.parts]
    assert parts == device.last.parts
    assert [part.kind for part in parts[:2]] == ["call", "arguments"]
    assert len(pieces) > 2  # not all at the end


def test_a_thought_that_the_prompt_begins(
    callers: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("thinks") / "target"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}"
    tiny_artifact(target, tokens=CALLER_PIECES, seed=1, sharpness=0.7, template=template)
    requests: dict[str, Any] = {"schema": {"enum": ["ab", "ba"]}, "max_tokens": 60}
    with (
        EdgeServer(target, threads=1) as edge,
        Device(callers.draft, edge.endpoint, threads=1) as device,
    ):
        for protocol in ("stream", "greedy", "ahead"):
            answer = device.generate("move", protocol=protocol, logit_bias=THOUGHT_ENDS, **requests)
            assert answer.text.startswith("</think>")
            assert answer.turn.content in ('"ab"', '"ba"')
        free = device.generate("move", protocol="greedy", max_tokens=20)
        assert free.turn.content == ""  # it has not ended its thought
        assert free.turn.reasoning.strip() == free.text.strip()


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ([3, 1], {"tools": TOOLS}, "need a text or messages"),
        (Talk(SAID), {"tools": TOOLS}, "a Talk has its own"),
        ("x", {"tools": [tool("a b")]}, "cannot be the name of a function"),
        ("x", {"tools": TOOLS, "tool_choice": "fly"}, "is not the name of a tool"),
        ("x", {"tool_choice": "required"}, "needs tools"),
    ],
)
def test_tools_that_cannot_be(
    device: Device, prompt: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(UnsupportedError, match=text):
        device.generate(prompt, **options)


class Mistral(RandomSource):
    """Random weights with a control token of Mistral's."""

    def __init__(self, sharpness: float) -> None:
        tokens = [*CALLER_PIECES, "M"]
        config = tiny_config(vocab_size=len(tokens) + 1, context=4096)
        template = "{% for m in messages %}{{ m.content }}{% endfor %}{# [TOOL_CALLS] #}"
        super().__init__(config, seed=1, tokens=tokens, sharpness=sharpness, template=template)
        payload = json.loads(self.vocabulary.tokenizer_json)
        id = payload["model"]["vocab"].pop("M")
        payload["model"]["vocab"]["[TOOL_CALLS]"] = id
        payload["added_tokens"].append(
            {**payload["added_tokens"][0], "id": id, "content": "[TOOL_CALLS]"}
        )
        self.change_vocabulary(tokenizer_json=json.dumps(payload))


def test_calls_that_a_control_token_begins(tmp_path: Path) -> None:
    for name, sharpness in (("draft", 0.9), ("target", 0.7)):
        export_model(Mistral(sharpness), tmp_path / name, precision="fp32")
    options: dict[str, Any] = {"tools": TOOLS, "max_tokens": 300}
    with (
        EdgeServer(tmp_path / "target", threads=1) as edge,
        Device(tmp_path / "draft", edge.endpoint, threads=1) as device,
    ):
        for choice, bias in (("required", {}), ("auto", {CALLER_PIECES.index("a"): -100.0})):
            options |= {"tool_choice": choice, "logit_bias": bias}
            wanted = device.generate(SAID, protocol="stream", **options)
            for protocol in ("greedy", "ahead"):
                answer = device.generate(SAID, protocol=protocol, **options)
                assert answer.tokens == wanted.tokens
            if choice == "required":
                assert wanted.text.startswith("[TOOL_CALLS][")
                assert called(wanted)
                assert len(wanted.turn.calls[0].id) == 9


def test_tools_that_are_not_to_be_called_are_told_of(device: Device) -> None:
    talk = Talk(SAID, Tools.read(TOOLS, "none"))
    info = device.prompt(Talk(SAID, Tools.read(TOOLS)))
    assert device.prompt(talk).ids.tolist() == info.ids.tolist()
    answer = device.generate(talk, protocol="coupled", max_tokens=60, temperature=1.0)
    assert answer.turn.calls == ()
    assert "<tool_call>" not in answer.text


def test_across_a_bridge(
    edge: EdgeServer, device: Device, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The drafter shares single characters with the target, and its template is another."""
    folder = tmp_path_factory.mktemp("across") / "draft"
    ours = [piece for piece in CALLER_PIECES if len(piece) == 1 and piece not in "tx5"]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tiny_artifact(folder, tokens=ours, eos="<other end>", seed=3, context=4096, template=template)
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 150}
    with Device(folder, edge.endpoint, threads=1) as other:
        for protocol in ("greedy", "ahead"):
            answer = other.generate(SAID, protocol=protocol, **options)
            assert answer.tokens == device.generate(SAID, protocol="stream", **options).tokens
            assert called(answer)
