"""Prompts of megabytes at the HTTP service: refused early, and all others are served meanwhile."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pilotfish.device_runtime.service.openai import CompletionRequest, chat_request, text_request
from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.wire.request import Request
from tests.support import web
from tests.support.serving import Serving, serving
from tests.support.tiny import tiny_artifact

CONTEXT = 1 << 17
MEBIBYTE = 2**20
CHARACTERS = 60 * CONTEXT  # the body may have 64 bytes a token


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A service with a context as large as those of real models."""
    draft = tiny_artifact(tmp_path_factory.mktemp("roomy") / "draft", context=CONTEXT)
    with serving(draft.path, None) as started:
        yield started


def slowest_health_s(service: Serving, posts: list[dict[str, object]]) -> float:
    """While these completions are asked for, all at once; each is refused as too long."""
    slowest_s, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal slowest_s
        while not ended.is_set():
            began_s = time.monotonic()
            assert service.get("/health").status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            time.sleep(0.02)

    def post(body: dict[str, object]) -> None:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = web.post(service.url + path, json=body, timeout=120)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"

    with ThreadPoolExecutor(len(posts) + 1) as pool:
        watching = pool.submit(watch)
        try:
            list(pool.map(post, posts))
        finally:
            ended.set()
        watching.result()
    return slowest_s


@pytest.mark.timing
@pytest.mark.parametrize("kind", ["words", "letters", "message", "ids"])
def test_a_prompt_of_megabytes_delays_no_other_request(roomy: Serving, kind: str) -> None:
    words = "the quick brown fox " * (CHARACTERS // 20)
    body: dict[str, object] = {
        "words": {"prompt": words},
        "letters": {"prompt": "a" * CHARACTERS},
        "message": {"messages": [{"role": "user", "content": words}]},
        "ids": {"prompt": [1] * (CHARACTERS // 3)},
    }[kind]
    before = roomy.resident_bytes()
    began_s = time.monotonic()
    assert slowest_health_s(roomy, [body, body]) < 1.0
    assert time.monotonic() - began_s < 10
    assert roomy.resident_bytes() - before < 128 * MEBIBYTE


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (text_request, b'{"prompt": [%s 1]}'),
        (text_request, b'{"prompt": "a", "stop": [%s 1]}'),
        (text_request, b'{"prompt": "a", "logit_bias": [%s 1]}'),
        (text_request, b'{"prompt": "a", "metadata": [%s 1], "stop": 1}'),
        (chat_request, b'{"messages": [{"role": "user", "content": [%s 1]}]}'),
        (chat_request, b'{"messages": [{"role": [%s 1], "content": "a"}]}'),
        (chat_request, b'{"messages": [{"role": "user", "content": "a", "tool_calls": [%s 1]}]}'),
    ],
    ids=lambda value: value.decode()[:-9] if isinstance(value, bytes) else "",
)
def test_millions_of_objects_are_not_made_to_be_refused(
    read: Callable[[bytes, Request], CompletionRequest], body: bytes
) -> None:
    long = body % (b"[]," * (CHARACTERS // 3))
    tracemalloc.start()
    try:
        with pytest.raises(RefusalError):
            read(long, Request())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(long)  # as objects they take twenty times as much


@pytest.mark.parametrize(
    ("read", "begins", "each", "ends", "word"),
    [
        (text_request, b'{"prompt": "a"', b',"k%d":1', b"}", "k0"),
        (
            text_request,
            b'{"prompt": "a", "pilotfish": {"window": 1',
            b',"k%d":1',
            b"}}",
            "pilotfish.k0",
        ),
        (chat_request, b'{"messages": [{"role": "user"', b',"k%d":1', b"}]}", "messages[0].k0"),
        (chat_request, b'{"messages": [{}', b",{}", b"]}", "role"),
    ],
    ids=["fields", "fields of the extension", "fields of a message", "messages"],
)
def test_reading_ends_at_the_first_unknown_field(
    read: Callable[[bytes, Request], CompletionRequest],
    begins: bytes,
    each: bytes,
    ends: bytes,
    word: str,
) -> None:
    """What follows is not even made into objects."""
    many = (each % at if b"%" in each else each for at in range(500_000))
    long = begins + b"".join(many) + ends
    tracemalloc.start()
    try:
        with pytest.raises(RefusalError) as refused:
            read(long, Request())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert word in str(refused.value)
    assert peak < 3 * len(long)  # it may be copied, but no objects are made of it


@pytest.mark.parametrize("whole", [None, True, False])
def test_a_text_of_megabytes_to_tokenize_is_refused(roomy: Serving, whole: bool | None) -> None:
    """Not an error of the service's own, whichever way the text would be read."""
    body = {"prompt": "q z" * (1 << 20), "add_special_tokens": whole}
    answer = web.post(roomy.url + "/tokenize", json=body, timeout=60)
    assert answer.status_code == 400
    assert "tokens" in answer.json()["error"]["message"]
