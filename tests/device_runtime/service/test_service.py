"""OpenAI's API over a device, asked by OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest

from pilotfish import Device
from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.device_runtime.service.tokens import tokenize_request
from pilotfish.speculation.randomness import derive_seed
from tests.conftest import Pair
from tests.support import web
from tests.support.serving import Serving, chat, content_of, serving

SAY = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "move"}}]
SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(service: Serving) -> openai.OpenAI:
    return service.client()


@pytest.mark.parametrize("options", [{"max_tokens": 24}, SAMPLED], ids=["greedy", "sampled"])
def test_streamed_or_not_the_text_is_the_devices_own(
    client: openai.OpenAI, device: Device, options: dict[str, Any]
) -> None:
    wanted = device.generate("hello", protocol="auto", **options)
    whole = chat(client, **options)
    assert whole.choices[0].message.content == wanted.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == wanted.finish_reason
    assert whole.object == "chat.completion"
    assert whole.usage.prompt_tokens == wanted.prompt_tokens
    assert whole.usage.completion_tokens == len(wanted.tokens)
    chunks = list(chat(client, stream=True, **options))
    assert content_of(chunks) == wanted.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == wanted.finish_reason
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_thrifty_request_gets_the_same_text(client: openai.OpenAI, device: Device) -> None:
    whole = chat(client, max_tokens=24, extra_body={"pilotfish": {"thrift": True}})
    assert (
        whole.choices[0].message.content
        == device.generate("hello", protocol="greedy", max_tokens=24).text
    )


def test_a_stream_tells_usage_where_tokens_come_from_and_how_it_went(client: openai.OpenAI) -> None:
    chunks = list(
        chat(
            client,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"pilotfish": {"protocol": "greedy", "window": 3}},
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].pilotfish["protocol"] == "greedy"
    assert chunks[-1].pilotfish["window"] == 3
    assert chunks[-1].pilotfish["recoveries"] == []
    pilotfishs = [chunk.choices[0].pilotfish for chunk in chunks[1:-2]]
    assert sum(item["tokens"] for item in pilotfishs) == 12
    assert {item["origin"] for item in pilotfishs} <= {"drafted", "corrected", "bonus"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer(client: openai.OpenAI, stream: bool) -> None:
    text = chat(client, max_tokens=40).choices[0].message.content
    stop = text[10:12]
    answer = chat(client, max_tokens=40, stop=[stop], stream=stream)
    got = content_of(answer) if stream else answer.choices[0].message.content
    assert got == text[: text.index(stop)]
    if not stream:
        assert answer.choices[0].finish_reason == "stop"


def test_completions_of_texts_and_of_ids(client: openai.OpenAI, device: Device) -> None:
    options: dict[str, Any] = {"model": "pilotfish", "temperature": 0}
    ids = device.tokenizer.encode("onceupon")
    wanted = device.generate(ids, protocol="greedy", max_tokens=16)
    for prompt in ("onceupon", ids, ["onceupon"], [ids]):
        answer = client.completions.create(prompt=prompt, **options)
        assert answer.choices[0].text == wanted.text
        assert answer.object == "text_completion"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(wanted.tokens)
    chunks = list(client.completions.create(prompt=ids, stream=True, max_tokens=16, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted.text


def test_content_may_be_parts_and_a_developer_is_the_system(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    plain = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    other = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    options: dict[str, Any] = {"model": "pilotfish", "temperature": 0, "max_tokens": 8}
    first, second = (
        client.chat.completions.create(messages=messages, **options) for messages in (plain, other)
    )
    assert first.choices[0].message.content == second.choices[0].message.content
    # what an answer was may come back in the next turn as the client holds it
    turn = [*plain, first.choices[0].message.model_dump(), {"role": "user", "content": "go on"}]
    again = client.chat.completions.create(messages=turn, **options)
    assert again.usage is not None
    assert again.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_control_token_in_a_message_is_text(client: openai.OpenAI, device: Device) -> None:
    end = device.tokenizer.piece(device.tokenizer.vocab_size - 1)
    assert device.tokenizer.encode(end, special=True) == [device.tokenizer.vocab_size - 1]
    prompt_tokens = chat(client, f"hello{end}", max_tokens=1).usage.prompt_tokens
    assert prompt_tokens == len(device.tokenizer.encode(f"uhello{end}a"))
    assert prompt_tokens > len(device.tokenizer.encode(f"uhello{end}a", special=True))


def test_an_answer_without_a_limit_ends_with_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="pilotfish", messages=[{"role": "user", "content": "x" * 20}], temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 128
    assert answer.usage.total_tokens == 256


PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.9}
VLLM = {"min_p": 0.02, "repetition_penalty": 1.4}


def test_bias_and_penalties_are_the_devices(client: openai.OpenAI, device: Device) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 24, **PENALTIES}
    wanted = device.generate("hello", protocol="stream", logit_bias={9: 4.0}, **options, **VLLM)
    answer = chat(client, **options, logit_bias={"9": 4}, extra_body=VLLM)
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].message.content != chat(client, **options).choices[0].message.content


@pytest.mark.parametrize("token", [10**6, 64])
def test_a_bias_of_no_token(client: openai.OpenAI, token: int) -> None:
    with pytest.raises(openai.BadRequestError, match=f"token {token}, but the target has 64"):
        chat(client, max_tokens=2, logit_bias={str(token): 1})


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(client: openai.OpenAI, device: Device, stream: bool) -> None:
    wanted = device.generate("hello", protocol="stream", max_tokens=12, logprobs=2)
    answer = chat(client, max_tokens=12, logprobs=True, top_logprobs=2, stream=stream)
    results: list[Any] = []
    for part in answer if stream else [answer]:
        for choice in part.choices:
            results += choice.logprobs.content if choice.logprobs else []
    tokenizer = device.tokenizer
    info = [(token, its) for token, its in zip(wanted.tokens, wanted.logprobs, strict=True)
            if not tokenizer.is_special(token)]  # fmt: skip
    assert len(results) == len(info)
    for item, (token, its) in zip(results, info, strict=True):
        assert its is not None
        assert bytes(item.bytes) == tokenizer.token_bytes(token)
        assert abs(item.logprob - its.logprob) < 1e-3
        assert [
            abs(a.logprob - b) < 1e-3 for a, (_, b) in zip(item.top_logprobs, its.top, strict=True)
        ]
    plain = chat(client, max_tokens=12)
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_text(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"prompt": "once", "echo": True, "max_tokens": 8, "temperature": 0}
    answer = client.completions.create(model="pilotfish", logprobs=3, stream=stream, **options)
    tokens, offsets, tops, text = [], [], [], ""
    for part in answer if stream else [answer]:
        for choice in part.choices:
            text += choice.text
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens
                offsets += choice.logprobs.text_offset
                tops += choice.logprobs.top_logprobs
    # a whole answer tells the prompt's, too; its first token has none
    assert offsets[0] == (len("once") if stream else 0)
    assert len(tokens) == len(offsets) == len(tops) >= 7
    if not stream:
        assert tops.pop(0) is None
    assert all(0 < len(top) <= 3 for top in tops)
    assert all(
        text[at] in (token[0], "\ufffd") for at, token in zip(offsets[:1], tokens, strict=False)
    )


def test_several_choices_share_a_prompt_and_differ_in_their_seeds(
    client: openai.OpenAI, device: Device
) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12}
    seeds = [derive_seed(3, choice) for choice in range(3)]
    assert seeds[0] == 3
    wanted = [device.generate("hello", protocol="stream", **{**options, "seed": s}) for s in seeds]
    assert len({choex.text for choex in wanted}) == 3
    answer = chat(client, n=3, **options)
    assert [choex.message.content for choex in answer.choices] == [choex.text for choex in wanted]
    assert [choex.index for choex in answer.choices] == [0, 1, 2]
    assert [choex.finish_reason for choex in answer.choices] == [
        choex.finish_reason for choex in wanted
    ]
    assert answer.usage.prompt_tokens == wanted[0].prompt_tokens
    assert answer.usage.completion_tokens == sum(len(choex.tokens) for choex in wanted)
    assert [choex.pilotfish["rounds"] > 0 for choex in answer.choices] == [True] * 3
    # streamed: one choice after the other
    info = {"include_usage": True}
    chunks = list(chat(client, n=3, stream=True, stream_options=info, **options))
    texts, ends, roles = ["", "", ""], [None] * 3, [0, 0, 0]
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason or ends[choice.index]
        roles[choice.index] += choice.delta.role is not None
    assert texts == [choex.text for choex in wanted]
    assert ends == [choex.finish_reason for choex in wanted]
    assert roles == [1, 1, 1]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, name) == getattr(answer.usage, name)


def test_choices_without_a_seed_differ(client: openai.OpenAI) -> None:
    answer = chat(client, n=4, temperature=1.0, max_tokens=12)
    assert len({choex.message.content for choex in answer.choices}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_may_begin_with_its_prompt(
    client: openai.OpenAI, device: Device, stream: bool
) -> None:
    ids = device.tokenizer.encode("onceupon")
    wanted = device.generate(ids, protocol="greedy", max_tokens=8).text
    # the tiny vocabulary has no blank
    for prompt, said_first in (("onceupon", "onceupon"), (ids, "onceupon")):
        answer = client.completions.create(
            model="pilotfish", prompt=prompt, echo=True, n=2, max_tokens=8, temperature=0,
            stream=stream,
        )  # fmt: skip
        texts = ["", ""]
        for part in answer if stream else [answer]:
            for choice in part.choices:
                texts[choice.index] += choice.text
        assert texts == [said_first + wanted] * 2


def test_log_probabilities_of_a_prompt(service: Serving, device: Device) -> None:
    def ask(route: str, **info: Any) -> Any:
        answer = web.post(f"{service.url}/v1/{route}", json={"max_tokens": 4, **info}, timeout=60)
        return answer.json()

    ids = device.prompt("onceupon", chat=False).ids.tolist()
    wanted = device.generate(
        ids, protocol="greedy", max_tokens=4, prompt_logprobs=2
    ).prompt_logprobs
    info = ask("completions", prompt="onceupon", temperature=0, prompt_logprobs=2)
    result = info["choices"][0]["prompt_logprobs"]
    assert result[0] is None
    assert len(result) == len(ids)
    for token, its, item in zip(ids[1:], wanted[1:], result[1:], strict=True):
        assert its is not None
        assert abs(item[str(token)]["logprob"] - its.logprob) < 1e-5
        assert [*item][:2] == [str(id) for id, _ in its.top]
    echoed = ask("completions", prompt="onceupon", temperature=0, echo=True, logprobs=1)
    logprobs = echoed["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == echoed["choices"][0]["text"]
    assert logprobs["text_offset"][0] == 0
    lines = [{"role": "user", "content": "once"}]
    chatted = ask("chat/completions", messages=lines, prompt_logprobs=0)
    assert len(chatted["choices"][0]["prompt_logprobs"]) == chatted["usage"]["prompt_tokens"]
    refused = ask("completions", prompt="once", prompt_logprobs=1, stream=True)
    assert refused["error"]["param"] == "prompt_logprobs"


def test_every_token_of_an_echoed_prompt_has_an_entry(service: Serving, device: Device) -> None:
    def ask(prompt: Any) -> Any:
        info = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        answer = web.post(f"{service.url}/v1/completions", json=info, timeout=60.0).json()
        return answer["choices"][0], answer["usage"]

    mark, words = device.vocabulary.eos_ids[0], device.tokenizer.encode("onceupon")
    wanted = device.generate([mark, *words], max_tokens=1, prompt_logprobs=0).prompt_logprobs
    for prompt in ([mark, *words], [*words[:2], mark, *words[2:]], [mark, mark], [*words, mark]):
        choice, used = ask(prompt)
        logprobs, text = choice["logprobs"], choice["text"]
        tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
        assert len(tokens) == used["prompt_tokens"] + used["completion_tokens"] == len(prompt) + 1
        assert [at for at, item in enumerate(logprobs["token_logprobs"]) if item is None] == [0]
        assert [device.tokenizer.piece(id) for id in prompt] == tokens[:-1]
        for begin, token in zip(offsets[:-1], tokens[:-1], strict=True):
            assert text[begin:].startswith(token)
    # as harnesses count: what follows the first tokens, without the token that was drawn
    choice, _ = ask([mark, *words])
    info = [item.logprob for item in wanted if item is not None]
    assert np.allclose(choice["logprobs"]["token_logprobs"][1:-1], info, atol=1e-5)


def test_the_best_of_several_answers(service: Serving) -> None:
    def ask(**info: Any) -> dict[str, Any]:
        body = {"prompt": "once", "max_tokens": 6, "temperature": 1.0, "seed": 3, **info}
        answer = web.post(f"{service.url}/v1/completions", json=body, timeout=60.0)
        result: dict[str, Any] = answer.json()
        return result

    def likelihood(choice: dict[str, Any]) -> float:
        info = choice["logprobs"]["token_logprobs"]
        return float(np.mean(info)) if info else -np.inf

    every = ask(n=5, logprobs=0)["choices"]
    wanted = sorted(every, key=likelihood, reverse=True)[:2]
    assert len({choice["text"] for choice in every}) > 2
    best = ask(n=2, best_of=5)["choices"]
    assert [choice["text"] for choice in best] == [choice["text"] for choice in wanted]
    assert best[0]["logprobs"] is None
    assert ask(n=2, best_of=1)["error"]["param"] == "best_of"
    assert ask(best_of=2, stream=True)["error"]["param"] == "best_of"


def test_tokens_of_a_prompt(service: Serving, device: Device) -> None:
    messages = [{"role": "user", "content": "hello"}]
    for body in ({"prompt": "once"}, {"messages": messages}):
        first: Any = next(iter(body.values()))
        wanted = device.prompt(first, chat="messages" in body).ids.tolist()
        info = web.post(f"{service.url}/tokenize", json={**body, "return_token_strs": True}).json()
        assert info["tokens"] == wanted
        assert info["count"] == len(wanted)
        assert info["token_strs"] == [device.tokenizer.piece(id) for id in wanted]
        assert info["max_model_len"] == 256
        back = web.post(f"{service.url}/detokenize", json={"tokens": wanted}).json()
        assert back == {"prompt": device.tokenizer.decode(wanted, special=True)}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/tokenize", {}), ("/tokenize", {"prompt": "x", "messages": []}),
        ("/tokenize", {"prompt": 3}), ("/tokenize", {"prompt": "x", "chat_template_kwargs": {}}),
        ("/tokenize", []), ("/detokenize", {"tokens": [64]}), ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "x"}), ("/detokenize", {}),
    ],
)  # fmt: skip
def test_what_has_no_tokens(service: Serving, route: str, body: object) -> None:
    answer = web.post(service.url + route, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "Give a prompt or messages."),
        ({"prompt": "x", "messages": SAY}, "prompt",
         "Give either a prompt or messages, not both."),
        ({"messages": SAY, "add_special_tokens": True}, "add_special_tokens",
         "add_special_tokens can only be used with a prompt."),
        ({"prompt": "x", "tools": TOOLS}, "tools", "tools can only be used with messages."),
        ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs",
         "chat_template_kwargs can only be used with messages."),
    ],
)  # fmt: skip
def test_fields_of_tokenize_that_exclude_each_other(
    body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RefusalError) as refused:
        tokenize_request(json.dumps(body).encode())
    assert (refused.value.param, refused.value.message) == (param, message)


@pytest.mark.parametrize(
    ("route", "body"), [("/tokenize", {"prompt": "once"}), ("/detokenize", {"tokens": [1]})]
)
def test_tokens_of_another_model(service: Serving, route: str, body: dict[str, Any]) -> None:
    answer = web.post(service.url + route, json={**body, "model": "another"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert web.post(service.url + route, json={**body, "model": "pilotfish"}).status_code == 200


def test_there_are_no_embeddings(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        client.embeddings.create(model="pilotfish", input="x")


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["pilotfish"]
    assert client.models.retrieve("pilotfish").id == "pilotfish"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-4")
    assert refused.value.code == "model_not_found"


def test_health_metrics_and_status(service: Serving) -> None:
    chat(service.client())
    health = service.get("/health")
    assert health.status_code == 200
    assert health.json()["edge_up"] is True
    assert service.metric("pilotfish_generation_tokens_total") >= 12
    assert service.metric('pilotfish_http_requests_total{route="/v1/chat/completions"') >= 1
    status = service.get("/status").json()
    assert status["link"]["up"] is True
    assert status["lanes"]["total"] == 3
    assert status["target"] is not None
    assert service.get("/").headers["content-type"].startswith("text/html")


def test_where_the_edge_is_absent_the_drafter_may_answer_and_marks_it(pair: Pair) -> None:
    flags = ("--on-link-loss", "local")
    with serving(pair.draft, "tcp://127.0.0.1:9", *flags) as alone:
        health = alone.get("/health")
        assert (health.status_code, health.json()["edge_up"]) == (200, False)
        chunks = list(chat(alone.client(), stream=True))
        assert {chunk.choices[0].pilotfish["origin"] for chunk in chunks[1:-1]} == {"local"}
        assert alone.metric('pilotfish_generation_tokens_total{origin="local"') == 12


def test_a_service_without_an_edge(pair: Pair) -> None:
    with serving(pair.draft, None) as alone:
        assert alone.get("/health").status_code == 200
        assert chat(alone.client()).choices
        body = {"messages": [{"role": "user", "content": "x"}], "pilotfish": {"protocol": "dsd"}}
        answer = web.post(f"{alone.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "edge" in json.loads(answer.text)["error"]["message"]
