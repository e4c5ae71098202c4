"""`pilotfish device serve` with a drafter of other tokens than the target's: OpenAI's client sees
the target only."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.device_runtime.service.device_service import DeviceService
from tests.bridge.test_drafter import OWN, THEIRS, common
from tests.support.pass_counter import PassCounter
from tests.support.serving import Serving, chat, content_of, eventually, serving
from tests.support.tiny import tiny_artifact

LETTERS = [*"suo"]  # the first ones of roles; the drafter has none of them
CONTEXT, DRAFTERS = 256, 128
TEMPLATES = {
    "draft": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}"
    "{% endif %}x{{ m.content }}{% endfor %}d",
    "target": "{% for m in messages %}{{ m.role[0] }}{{ m.content }}Ċ{% endfor %}",
}
TURN: list[dict[str, str]] = [{"role": "user", "content": "ab cd abcd"}]
TURNS = [
    {"role": "system", "content": "abc da"},
    *TURN,
    {"role": "assistant", "content": "cd cd"},
    {"role": "user", "content": "abcd abcd"},
]
PLAIN: dict[str, Any] = {"model": "pilotfish", "temperature": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    vocabularies = {"draft": OWN, "target": [*THEIRS, *LETTERS], "other": [*"abcdus", "Ġ", "us"]}
    for seed, (name, tokens) in enumerate(vocabularies.items()):
        context = DRAFTERS if name == "draft" else CONTEXT
        sizes: dict[str, Any] = {"seed": seed, "context": context, "sharpness": 0.8}
        tiny_artifact(folder / name, tokens=tokens, eos=f"<end of {name}>", **sizes)
        manifest = folder / name / "manifest.json"
        info = json.loads(manifest.read_text()) | {"eos_ids": []}  # answers are long
        info["chat_template"] = TEMPLATES.get(name, info["chat_template"])
        manifest.write_text(json.dumps(info))
    return {name: folder / name for name in vocabularies}


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[EdgeServer]:
    with EdgeServer(models["target"], threads=1, sessions=50) as opened:
        yield opened


@pytest.fixture(scope="module")
def device(models: dict[str, Path], server: EdgeServer) -> Iterator[Device]:
    """It says what is to be expected."""
    with Device(models["draft"], server.endpoint, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def service(models: dict[str, Path], server: EdgeServer) -> Iterator[Serving]:
    with serving(models["draft"], server.endpoint, "--lanes", 2) as started:
        yield started


@pytest.fixture(scope="module")
def client(service: Serving) -> openai.OpenAI:
    return service.client()


def alone(device: Device, requests: Any, **options: Any) -> Any:
    """What the target says by itself."""
    return device.generate(requests, **{"max_tokens": 40, **options, "protocol": "stream"})


@pytest.mark.parametrize("messages", [TURN, TURNS], ids=["one turn", "with a system message"])
@pytest.mark.parametrize("protocol", ["auto", "greedy", "coupled"])
def test_a_chat_is_the_targets(
    client: openai.OpenAI, device: Device, messages: list[dict[str, str]], protocol: str
) -> None:
    wanted = alone(device, messages)
    prompt = device.prompt(messages)
    assert len(prompt.draft_ids) != len(prompt.ids)
    options: dict[str, Any] = {**PLAIN, "max_tokens": 40, "messages": messages}
    options["extra_body"] = {"pilotfish": {"protocol": protocol}}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == wanted.text
    assert whole.usage.prompt_tokens == len(prompt.ids)
    assert whole.usage.completion_tokens == 40
    chunks = [*client.chat.completions.create(stream=True, **options)]
    assert content_of(chunks) == wanted.text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_what_is_sampled_is_the_targets_seeded_sample(
    client: openai.OpenAI, device: Device
) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 40}
    wanted = alone(device, "ab cd", **options)
    body = {"pilotfish": {"protocol": "coupled"}}
    assert chat(client, "ab cd", extra_body=body, **options).choices[0].message.content == (
        wanted.text
    )


def test_completions_of_texts_and_of_the_targets_ids(client: openai.OpenAI, device: Device) -> None:
    text = "ab cd abcd dd z"
    ids = device.tokenizer.encode(text)
    wanted = alone(device, ids)
    for prompt in (text, ids, [text], [ids]):
        answer = client.completions.create(prompt=prompt, max_tokens=40, **PLAIN)
        assert answer.choices[0].text == wanted.text
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids)
    chunks = client.completions.create(prompt=ids, max_tokens=40, stream=True, **PLAIN)
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted.text


def test_ids_are_bounded_by_the_targets_vocabulary(client: openai.OpenAI, device: Device) -> None:
    size = device.tokenizer.vocab_size
    assert size > len(OWN) + 1
    assert client.completions.create(prompt=[size - 1], max_tokens=1, **PLAIN).choices
    for wrong in ([size], [-1], [1, 2**40]):
        with pytest.raises(openai.BadRequestError, match="not a token id"):
            client.completions.create(prompt=wrong, max_tokens=1, **PLAIN)


def test_an_answer_ends_with_the_targets_context(client: openai.OpenAI, device: Device) -> None:
    """The drafter's own is smaller, and full before that."""
    assert device.context == CONTEXT
    answer = client.chat.completions.create(messages=TURN, **PLAIN)
    assert answer.usage is not None
    assert answer.usage.total_tokens == CONTEXT
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == alone(device, TURN, max_tokens=CONTEXT).text
    assert client.models.list().data[0].model_dump()["max_model_len"] == CONTEXT
    with pytest.raises(openai.BadRequestError, match="at most 255"):
        chat(client, "abcd" * CONTEXT)


def test_the_drafter_alone_answers_as_far_as_it_can(client: openai.OpenAI) -> None:
    body = {"pilotfish": {"protocol": "local"}}
    answer = client.chat.completions.create(messages=TURN, extra_body=body, **PLAIN)
    assert answer.usage is not None
    assert 40 < answer.usage.total_tokens < CONTEXT
    with pytest.raises(openai.BadRequestError, match="drafter's"):
        chat(client, "ab d" * 55, extra_body=body)


def test_both_ends_read_only_what_is_new_in_a_second_turn(
    models: dict[str, Path], server: EdgeServer
) -> None:
    with Device(models["draft"], server.endpoint, threads=1) as device:
        passes = PassCounter(device._drafter._shared_model.engine.model)
        first = device.generate(TURN, protocol="greedy", max_tokens=30)
        read = device._drafter._shared_model.engine.contents.chain(device._drafter._slot).tolist()
        messages = [
            *TURN,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "abcd abcd"},
        ]
        prompt = device.prompt(messages)
        same = common(read, prompt.draft_ids.tolist())
        assert same >= len(device.prompt(TURN).draft_ids) - 1
        assert device.shared(prompt) >= len(device.prompt(TURN)) - 1
        passes.take()
        list(zip(device.stream(prompt, protocol="local", max_tokens=1), [0], strict=False))
        assert passes.take() == len(prompt.draft_ids) - same


def test_a_conversation_goes_on_where_the_targets_tokens_are_held(
    models: dict[str, Path], server: EdgeServer
) -> None:
    with serving(models["draft"], server.endpoint, "--lanes", 3) as service:
        texts = [letter * 60 for letter in "bcd"]
        for text in [*texts, *reversed(texts)]:
            chat(service.client(), text)
        info = [line for line in service.lines if "shares" in line]
        shares = [int(line.rpartition("shares")[2].split()[0]) for line in info]
        assert all(share < 10 for share in shares[:3])
        assert all(share > 50 for share in shares[3:])


def test_a_service_that_starts_before_its_edge(models: dict[str, Path], device: Device) -> None:
    """Its first client is answered, whatever the vocabulary that it has to learn for that."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    with serving(models["draft"], address, "--lanes", 2) as service:
        assert service.get("/health").status_code == 503
        with EdgeServer(models["target"], address, threads=1):
            eventually(lambda: service.get("/health").status_code == 200)
            # the drafter's own template, which is all that is known yet, refuses the first
            for messages in (TURNS, TURN):
                wanted = alone(device, messages, max_tokens=12).text
                options: dict[str, Any] = {**PLAIN, "max_tokens": 12, "messages": messages}
                answer = service.client().chat.completions.create(**options)
                assert answer.choices[0].message.content == wanted
            # whichever lane it was that met the edge
            assert service.get("/status").json()["target"] == "tiny"
            models_told = service.client().models.list().data
            assert models_told[0].model_dump()["max_model_len"] == CONTEXT


def test_a_service_that_is_led_to_an_edge_of_another_vocabulary(
    models: dict[str, Path], server: EdgeServer, tmp_path: Path
) -> None:
    config = tmp_path / "device.toml"

    def lead_to(edge: EdgeServer) -> None:
        config.write_text(f'edge = "{edge.endpoint}"\n')

    with EdgeServer(models["other"], threads=1) as other:
        wanted = []
        for edge in (server, other):
            with Device(models["draft"], edge.endpoint, threads=1) as device:
                wanted.append(alone(device, TURN, max_tokens=12).text)
        assert wanted[0] != wanted[1]
        lead_to(server)
        with serving(models["draft"], None, "--lanes", 2, "--config", config) as service:
            for edge, text in ((server, wanted[0]), (other, wanted[1]), (server, wanted[0])):
                lead_to(edge)
                service.tell(signal.SIGHUP)
                service.until("reloaded")
                for _ in range(3):
                    answer = chat(service.client(), TURN[0]["content"])
                    assert answer.choices[0].message.content == text


def test_no_edge_makes_the_service_read_endless_bodies() -> None:
    """Across a bridge the context is what the edge says."""

    class Told(DeviceService):
        context = 2**31 - 1

    assert Told.__new__(Told).body_bytes <= 1 << 26
