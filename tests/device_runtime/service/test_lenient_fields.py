"""Fields that clients of other servers send: neutral, unknown, and unsupported ones."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pilotfish.device_runtime.service.field_check import IgnoredFields
from pilotfish.device_runtime.service.openai import chat_request
from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.wire.request import Request
from tests.conftest import Pair
from tests.support import web
from tests.support.serving import Serving, serving

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HEADER = "x-pilotfish-ignored"
FUNCTION = {"type": "function", "function": {"name": "move", "parameters": {"type": "object"}}}
# Where each body's text is.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0},
    TEXT: {"prompt": "hello", "max_tokens": 4, "temperature": 0},
    RESPONSES: {"input": "hello", "max_output_tokens": 4, "temperature": 0, "store": False},
}
# Values without effect: of vLLM's, SGLang's, llama.cpp's, Ollama's, OpenAI's and others' clients.
NEUTRAL: list[dict[str, Any]] = [
    {"ignore_eos": False, "min_tokens": 0, "stop_token_ids": [], "use_beam_search": False},
    {"length_penalty": 1.0, "skip_special_tokens": True, "spaces_between_special_tokens": True},
    {"include_stop_str_in_output": False, "truncate_prompt_tokens": None, "bad_words": []},
    {"allowed_token_ids": None, "logits_processors": [], "priority": 0, "request_id": "a"},
    {"return_tokens_as_token_ids": False, "guided_json": None, "cache_salt": "x"},
    {"kv_transfer_params": None, "vllm_xargs": {}, "return_token_ids": None},
    {"seed": -1, "top_k": -1},
    {"top_k": 0, "min_p": 0, "repetition_penalty": 1},
    {"repeat_penalty": 1.0, "repeat_last_n": 64, "typical_p": 1, "tfs_z": 1.0, "n_probs": 0},
    {"mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "cache_prompt": True, "id_slot": -1},
    {"dry_multiplier": 0, "dry_base": 1.75, "xtc_probability": 0, "xtc_threshold": 0.1},
    {"dynatemp_range": 0, "dynatemp_exponent": 1, "grammar": "", "samplers": None}
    | {"timings_per_token": True, "n_keep": 0, "post_sampling_probs": False},
    {"regex": None, "ebnf": None, "separate_reasoning": True, "no_stop_trim": False, "rid": "a"},
    {"keep_alive": "5m", "format": "", "images": []},
    {"top_a": 0, "provider": {"order": ["x"]}, "transforms": [], "usage": {"include": True}},
    {"client_metadata": {"a": "b"}, "cache_control": {"type": "ephemeral"}, "service_tier": "auto"},
    {"safe_prompt": False, "metadata": {"a": "b"}, "user": "me", "safety_identifier": "x"},
    {"stream_options": {"include_obfuscation": False, "continuous_usage_stats": False}},
    {"logit_bias": {}, "stop": [], "structured_outputs": None, "stream": False},
]
OF_CHATS: list[dict[str, Any]] = [
    {"verbosity": "medium", "modalities": ["text"], "functions": [], "function_call": "none"},
    {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False},
    {"max_completion_tokens": -1, "echo": False, "best_of": 1, "tools": [], "tool_choice": "auto"},
    {"chat_template_kwargs": {}, "documents": [], "chat_template": None, "reasoning_effort": None},
    {"reasoning": {"exclude": True}, "enable_thinking": None, "top_logprobs": 0},
    {"web_search_options": None, "audio": None, "prompt_cache_options": {"a": 1}},
]
MESSAGES: list[dict[str, Any]] = [
    {"id": "msg_1", "cache_control": {"type": "ephemeral"}, "opts": {}, "refusal": None},
    {"content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
    {"prefix": False, "partial": False, "images": [], "timestamp": 3, "type": "message"},
    {"reasoning": None, "reasoning_details": [{"type": "x"}], "annotations": [], "audio": None},
    {"tool_calls": [], "function_call": None, "name": None, "tool_call_id": None},
]
# Known fields with values that would change the answer, which the service cannot give.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"repeat_penalty": 1.1}, "repeat_penalty"),
    (CHAT, {"typical_p": 0.9}, "typical_p"),
    (CHAT, {"mirostat": 2}, "mirostat"),
    (CHAT, {"guided_regex": "a+"}, "guided_regex"),
    (CHAT, {"grammar": "root ::= x"}, "grammar"),
    (CHAT, {"audio": {"voice": "x"}}, "audio"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, {"verbosity": "high"}, "verbosity"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": -2}, "max_tokens"),
    (CHAT, {"chat_template_kwargs": {"continue_final_message": True}},
     "chat_template_kwargs.continue_final_message"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "messages[0].images"),
    (CHAT, {"messages": [{"role": "assistant", "content": "x", "prefix": True}]},
     "messages[0].prefix"),
    (CHAT, {"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
    (CHAT, {"pilotfish": {"windw": 3}}, "pilotfish.windw"),
    (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"bad_words": ["x"]}, "bad_words"),
    (TEXT, {"add_special_tokens": False}, "add_special_tokens"),
    (RESPONSES, {"truncation": "auto"}, "truncation"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
]  # fmt: skip
# Fields that the service does not know, or cannot fulfil, and how it names them.
IGNORED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"nonsense": 1}, "nonsense"),
    (CHAT, {"nonsense": [[{}]], "min_tokens": 2}, "nonsense, min_tokens"),
    (CHAT, {"thinking_token_budget": 2, "min_new_tokens": 2, "min_length": 2, "min_tokens": 2},
     "thinking_token_budget, min_new_tokens, min_length, min_tokens"),
    (CHAT, {"stream_options": {"include_everything": True}}, "stream_options.include_everything"),
    (CHAT, {"response_format": {"type": "text", "depth": 3}}, "response_format.depth"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
     "response_format.json_schema.x"),
    (CHAT, {"chat_template_kwargs": {"mood": "good"}}, "chat_template_kwargs.mood"),
    (CHAT, {"reasoning": {"max_tokens": 9, "style": 1}}, "reasoning.style, reasoning.max_tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "hello", "mood": 1}]}, "messages[0].mood"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
     "messages[0].content[0].b"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0]"),
    (CHAT, {"tools": [FUNCTION, {"type": "custom", "custom": {"name": "x"}}]}, "tools[1]"),
    (CHAT, {"tools": [{**FUNCTION, "depth": 1}]}, "tools[0].depth"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "x", "depth": 1}}]},
     "tools[0].function.depth"),
    (TEXT, {"nön, sense": 1}, "n?n??sense"),
    (TEXT, {"nonsense": 1, "structured_outputs": {"regex": "a+", "depth": 1}},
     "nonsense, structured_outputs.depth"),
    (RESPONSES, {"nonsense": 1, "n": 1}, "nonsense, n"),
    (RESPONSES, {"tools": [{"type": "web_search", "external_web_access": False}]},
     "tools[0].external_web_access, tools[0]"),
    (RESPONSES, {"input": [{"role": "user", "content": "a", "x": 1}, {"role": "user",
     "content": [{"type": "input_text", "text": "a", "x": 1}], "x": 2}]},
     "input[0].x, input[1].content[0].x"),
    ("/tokenize", {"prompt": "a", "verse": 1}, "verse"),
    ("/detokenize", {"tokens": [1], "verse": 1}, "verse"),
]  # fmt: skip


@pytest.fixture(scope="module")
def strict(pair: Pair) -> Iterator[Serving]:
    with serving(pair.draft, None, "--lanes", 1, "--strict") as started:
        yield started


def post(service: Serving, path: str, more: dict[str, Any]) -> httpx.Response:
    return web.post(service.url + path, json={**BODIES.get(path, {}), **more}, timeout=60.0)


def generated(answer: httpx.Response) -> Any:
    """What was generated."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if "output" in body:
        return body["output"][0]["content"][0]["text"]
    (choice,) = body["choices"]
    return choice.get("text") or choice["message"]["content"]


@pytest.mark.parametrize("path", BODIES)
def test_neutral_values_change_nothing(service: Serving, strict: Serving, path: str) -> None:
    plain = generated(post(service, path, {}))
    for more in NEUTRAL + (OF_CHATS if path == CHAT else []):
        unknown = "samplers" in more
        answer = post(service, path, more)
        assert answer.headers.get(HEADER) == ("samplers" if unknown else None), more
        assert generated(answer) == plain, more
        assert post(strict, path, more).status_code == (400 if unknown else 200), more


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_notes_beside_a_message_change_nothing(
    service: Serving, strict: Serving, role: str
) -> None:
    base = {"role": role, "content": "hello"}
    last = {"role": "user", "content": "x"}
    plain = generated(post(service, CHAT, {"messages": [base, last]}))
    for more in MESSAGES:
        if role != "assistant":
            more = {name: more[name] for name in more if name not in ("tool_calls",)}
        for each in (service, strict):
            answer = post(each, CHAT, {"messages": [{**base, **more}, last]})
            assert HEADER not in answer.headers
            assert each is strict or generated(answer) == plain


def test_values_of_other_servers_for_none_and_for_one(service: Serving) -> None:
    long = post(service, TEXT, {"max_tokens": -1, "prompt": "hello" * 20})
    assert long.json()["usage"]["completion_tokens"] > 16
    greedy = generated(post(service, TEXT, {}))
    assert generated(post(service, TEXT, {"temperature": 1, "top_p": 0, "seed": 3})) == greedy
    thought = {"messages": [{"role": "assistant", "content": "a", "reasoning": "so"}]}
    assert post(service, CHAT, thought).status_code == 200


@pytest.mark.parametrize(("path", "more", "param"), REFUSED)
def test_what_would_change_the_answer_is_refused(
    service: Serving, strict: Serving, path: str, more: dict[str, Any], param: str
) -> None:
    for each in (service, strict):
        answer = post(each, path, more)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("path", "more", "names"), IGNORED)
def test_what_is_not_known_is_ignored_and_named(
    service: Serving, strict: Serving, path: str, more: dict[str, Any], names: str
) -> None:
    answer = post(service, path, more)
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, names), answer.text
    if path in BODIES:
        streamed = post(service, path, {**more, "stream": True})
        assert (streamed.status_code, streamed.headers[HEADER]) == (200, names)
    refused = post(strict, path, more).json()["error"]
    assert refused["code"] == "unknown_parameter"
    assert refused["message"].startswith("Unrecognized request argument supplied: ")


def test_a_field_is_logged_once_for_each_client(pair: Pair) -> None:
    with serving(pair.draft, None, "--lanes", 1) as fresh:
        for _ in range(3):
            mood = [{"role": "user", "content": "a", "mood": 1}] * 2
            post(fresh, CHAT, {"nonsense": 1, "messages": mood})
        post(fresh, CHAT, {"the last": 1})
        fresh.until("the field the?last")
        assert sum("the field nonsense" in line for line in fresh.lines) == 1
        assert sum("the field messages[].mood" in line for line in fresh.lines) == 1


def test_the_header_and_the_search_are_bounded() -> None:
    ignored = IgnoredFields(strict=False)
    names = b",".join(b'"%d%s": [[]]' % (at, b"x" * 200) for at in range(1000))
    body = b'{"messages": [{"role": "user", "content": "x"}], ' + names + b"}"
    tracemalloc.start()
    try:
        chat_request(body, Request(), ignored)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(str(ignored)) < 2500
    assert peak < 2 * len(body)
    many = b'{"messages": [{"role": "user", "content": "x"%s}]}' % (b', "a": 1' * 100_001)
    with pytest.raises(RefusalError, match="100,000 fields"):
        chat_request(many, Request(), IgnoredFields(strict=False))


def test_unsupported_values_behind_many_unknown_fields_are_refused() -> None:
    names = b",".join(b'"x%d": 1' % at for at in range(1000))
    body = b'{"messages": [{"role": "user", "content": "x", %s, "images": ["x"]}]}' % names
    with pytest.raises(RefusalError) as refused:
        chat_request(body, Request(), IgnoredFields(strict=False))
    assert refused.value.param == "messages[0].images"


@pytest.mark.parametrize("protocol", ["stream", "ahead", "coupled", "tslt", "local"])
def test_end_tokens_of_a_request(service: Serving, protocol: str) -> None:
    """``ignore_eos`` goes on to the limit; ``stop_token_ids`` end as end tokens do."""
    body = {"prompt": "once", "max_tokens": 60, "temperature": 1}
    body |= {"pilotfish": {"protocol": protocol}}

    def answer(seed: int, **more: Any) -> tuple[str, str, int]:
        whole = post(service, TEXT, {**body, "seed": seed, **more}).json()
        (choice,) = whole["choices"]
        return choice["text"], choice["finish_reason"], whole["usage"]["completion_tokens"]

    for seed in range(40):
        text, reason, count = answer(seed)
        if reason == "stop" and text:
            break
    else:
        pytest.fail("no answer ended by itself")
    longer, reason, whole_count = answer(seed, ignore_eos=True)
    assert (reason, whole_count) == ("length", 60)
    assert longer.startswith(text)
    assert count < 60
    if protocol == "local":
        return
    first = web.post(f"{service.url}/tokenize", json={"prompt": text}).json()["tokens"][0]
    stopped = answer(seed, stop_token_ids=[first], ignore_eos=True)
    assert stopped[1] == "stop"
    assert stopped[2] < 60


def test_only_allowed_tools_are_called() -> None:
    other = {"type": "function", "function": {"name": "stay", "parameters": {"type": "object"}}}
    names = [{"type": "function", "function": {"name": "move"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}}
    base = {"messages": [{"role": "user", "content": "x"}], "tools": [FUNCTION, other]}
    (talk,) = chat_request(json.dumps({**base, "tool_choice": choice}).encode(), Request()).prompts
    tools = talk.tools  # type: ignore[union-attr]  # a chat's prompt is a Talk
    assert tools is not None
    assert [tool.name for tool in tools.callable] == ["move"]
    assert [tool.name for tool in tools.tools] == ["move", "stay"]
    assert tools.choice == "required"
    names[0]["function"] = {"name": "fly"}
    with pytest.raises(RefusalError, match="fly"):
        chat_request(json.dumps({**base, "tool_choice": choice}).encode(), Request())
