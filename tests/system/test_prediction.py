"""A predicted text makes answers faster, and changes no token of them, at each place that takes it.

The tiny target repeats itself little, so all expected tokens come from the prediction.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Auto, Device, EdgeServer
from pilotfish.base.errors import TokenOutOfRangeError, UnsupportedError
from pilotfish.cli import main
from pilotfish.device_runtime.record import Generation
from pilotfish.speculation.logits_options import Grammar
from tests.conftest import VOCAB, Pair
from tests.support import web
from tests.support.serving import Serving

PROMPT = [60, 2, 33]  # token ids
TOKENS = 48


def answer(device: Device, protocol: str | Auto | None, **options: Any) -> Generation:
    return device.generate(PROMPT, protocol=protocol, max_tokens=TOKENS, seed=3, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("hints", ["all", "device", "edge"])
def test_the_edge_drafts_from_the_prediction(
    device: Device, hints: str, temperature: float
) -> None:
    plain = answer(device, "stream", temperature=temperature)
    options = {"hints": hints, "temperature": temperature, "prediction": plain.tokens}
    guided = answer(device, "ahead", **options)
    assert guided.tokens == plain.tokens
    _, accepted = guided.hints["prediction"]
    assert accepted > TOKENS / 2
    assert len(guided.rounds) < TOKENS / 3
    assert guided.accepted_prediction_tokens == guided.predicted_tokens == len(plain.tokens)


@pytest.mark.parametrize(("protocol", "temperature"), [("greedy", 0.0), ("coupled", 1.0)])
def test_the_device_drafts_from_the_prediction_in_windows(
    device: Device, protocol: str, temperature: float
) -> None:
    plain = answer(device, protocol, temperature=temperature)
    options = {"temperature": temperature, "prediction": plain.tokens}
    guided = answer(device, protocol, **options)
    assert guided.tokens == plain.tokens
    assert len(guided.rounds) < len(plain.rounds) / 2
    # windows grow while the prediction is right, except where the request names a window
    assert guided.rounds[0].window <= 4 < max(each.window for each in guided.rounds)
    named = answer(device, protocol, window=3, **options)
    assert named.tokens == plain.tokens
    assert max(each.window for each in named.rounds) == 3


def test_an_edited_text_is_drafted_from_after_each_edit(device: Device) -> None:
    plain = answer(device, "stream").tokens
    edited = [*plain[:10], 1, 2, *plain[10:20], *plain[25:]]
    guided = answer(device, "ahead", hints="edge", prediction=edited)
    assert guided.tokens == plain
    assert guided.hints["prediction"][1] > TOKENS / 3
    # the two inserted ids are not in the answer, unless it has them elsewhere
    assert len(edited) - 4 <= guided.accepted_prediction_tokens <= len(edited)


HOSTILE: dict[str, Any] = {
    "empty": "",
    "no ids": [],
    "nothing": None,
    "one token": [5],
    "one token, often": [5] * 5000,
    "every token": [*range(VOCAB)] * 40,
    "control tokens": [0, 1, 2] * 30,
    "a huge text": "abc " * 500_000,
    "control tokens' names": "<|im_end|><|endoftext|></s>" * 20,
    "half a character": "\ud800\ud800abc",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("protocol", ["ahead", "greedy", "stream", "local", None])
def test_any_prediction_changes_no_token(device: Device, protocol: str | None, name: str) -> None:
    plain = answer(device, "local" if protocol == "local" else "stream")
    guided = answer(device, protocol, prediction=HOSTILE[name])
    assert guided.tokens == plain.tokens
    assert 0 <= guided.accepted_prediction_tokens <= guided.predicted_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {7: 50.0, 9: -100.0}},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0},
        {"stop": ["a", "e"]},
        {"grammar": Grammar("regex", "[A-Z]{9}[a-zA-Z]{0,30}")},
        {"logprobs": 2},
        {"temperature": 0.9, "top_k": 8},
    ],
    ids=min,
)
@pytest.mark.parametrize("protocol", ["ahead", "coupled", None])
def test_with_other_options_of_the_request(
    device: Device, protocol: str | None, options: dict[str, Any]
) -> None:
    free = answer(device, "stream")
    plain = answer(device, "stream", **options)
    for prediction in (free.tokens, plain.tokens):
        guided = answer(device, protocol, prediction=prediction, **options)
        assert (guided.tokens, guided.text) == (plain.tokens, plain.text)


TOOL = {"type": "function", "function": {"name": "ab", "parameters": {"type": "object"}}}


def test_with_tools(device: Device) -> None:
    options: dict[str, Any] = {"tools": [TOOL], "max_tokens": 24}
    plain = device.generate("abc", protocol="stream", **options)
    for prediction in ("zq ab", plain.tokens):
        guided = device.generate("abc", protocol="ahead", prediction=prediction, **options)
        assert (guided.tokens, guided.turn) == (plain.tokens, plain.turn)


@pytest.mark.parametrize("protocol", ["tslt", "dsd", "dssd", "tree"])
def test_protocols_that_send_distributions_take_a_prediction(device: Device, protocol: str) -> None:
    """Their seeded texts depend on the drafts, but not at temperature 0."""
    plain = answer(device, "stream").tokens
    assert answer(device, protocol, temperature=0.0, prediction=plain).tokens == plain


def test_auto_takes_a_protocol_whose_edge_drafts_from_it(device: Device) -> None:
    plain = answer(device, "stream").tokens
    chosen = answer(device, None, prediction=plain)
    assert chosen.protocol == "ahead"
    assert chosen.hints["prediction"][1] > TOKENS / 2
    named = answer(device, Auto(among=["greedy"]), prediction=plain)
    assert named.protocol == "greedy"
    assert named.tokens == chosen.tokens == plain


def test_a_restarted_edge_gets_what_is_left_of_the_prediction(pair: Pair) -> None:
    options: dict[str, Any] = {"protocol": "ahead", "hints": "edge", "max_tokens": 120}
    first = EdgeServer(pair.target, threads=1).start()
    try:
        with Device(pair.draft, first.endpoint, threads=1, on_link_loss="wait") as device:
            plain = device.generate(PROMPT, temperature=1.0, seed=3, **options).tokens
            options["prediction"] = plain
            pieces = device.stream(PROMPT, temperature=1.0, seed=3, **options)
            next(pieces)
            first.stop()
            with EdgeServer(pair.target, first.endpoint, threads=1):
                for _ in pieces:
                    pass
        assert device.last is not None
        assert device.last.tokens == plain
        lost_at = device.last.recoveries[0].at
        later = [each for each in device.last.rounds if each.start >= lost_at]
        assert len(plain) - lost_at > 20
        assert sum(each.accepted for each in later if each.source == "prediction") > 10
    finally:
        first.stop()


def test_foreign_ids_and_other_types_are_refused(device: Device) -> None:
    with pytest.raises(TokenOutOfRangeError, match="token 640000"):
        answer(device, "ahead", prediction=[1, 640000])
    for wrong in (7, {"a": 1}, [1.5], ["a"]):
        with pytest.raises(UnsupportedError, match="prediction"):
            answer(device, "ahead", prediction=wrong)


def test_the_command_takes_a_file(
    pair: Pair, edge: EdgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.txt"
    command = ["device", "run", "abc", "--draft", str(pair.draft), "--edge", edge.endpoint]
    command += ["--threads", "1", "--max-tokens", "24", "--json", "-"]
    assert main(command) == 0
    plain = json.loads(capsys.readouterr().out)
    file.write_text(plain["answer"]["content"])
    assert main([*command, "--prediction", str(file)]) == 0
    guided = json.loads(capsys.readouterr().out)
    assert guided["protocol"] == "ahead"
    assert guided["answer"] == plain["answer"]
    assert main([*command, "--prediction", str(tmp_path / "none")]) != 0
    assert "cannot be read" in capsys.readouterr().err


def ask(service: Serving, route: str, **fields: Any) -> dict[str, Any]:
    body = {"max_tokens": 24, "temperature": 0, **fields}
    response = web.post(f"{service.url}/v1/{route}", json=body, timeout=60.0)
    assert response.status_code == 200, response.text
    answered: dict[str, Any] = response.json()
    return answered


@pytest.mark.parametrize("parts", [False, True])
def test_http_takes_it_and_counts_its_tokens(service: Serving, parts: bool) -> None:
    messages = [{"role": "user", "content": "abc"}]
    plain = ask(service, "chat/completions", messages=messages)
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert plain["usage"]["completion_tokens_details"] == none
    text = plain["choices"][0]["message"]["content"]
    halves = [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:] + "zq"}]
    prediction = {"type": "content", "content": halves if parts else text + "zq"}
    guided = ask(service, "chat/completions", messages=messages, prediction=prediction)
    assert guided["choices"][0]["message"]["content"] == text
    details = guided["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] >= 0
    assert guided["pilotfish"]["protocol"] == "ahead"
    streamed = web.post(
        f"{service.url}/v1/chat/completions",
        json={
            "messages": messages,
            "max_tokens": 24,
            "temperature": 0,
            "prediction": prediction,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        timeout=60.0,
    )
    assert "accepted_prediction_tokens" in streamed.text


@pytest.mark.parametrize(
    "prediction",
    [
        "abc",
        {"type": "other", "content": "a"},
        {"type": "content"},
        {"type": "content", "content": 7},
    ],
)
def test_http_refuses_another_form(service: Serving, prediction: Any) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "prediction": prediction}
    response = web.post(f"{service.url}/v1/chat/completions", json=body, timeout=60.0)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prediction")
