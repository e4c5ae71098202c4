"""The store keeps a client's responses for a time, up to a number and a size."""

from __future__ import annotations

import pytest

from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.device_runtime.service.responses_store import ResponseStore
from pilotfish.engines.chat_formats.reader import ToolCall, Turn


def kept_rows(store: ResponseStore, client: str, size: int = 100) -> str:
    """Keep a response of about so many bytes; returns its id."""
    name = f"resp_{len(store)}_{client}_{size}"
    store.store(client, [], {"id": name, "output": "x" * size}, Turn("", "", ()))
    return name


def test_the_store_forgets_in_time() -> None:
    now_s = 0.0
    store = ResponseStore(clock=lambda: now_s)
    first = kept_rows(store, "alice")
    now_s = 3000.0
    second = kept_rows(store, "alice")
    now_s = 3599.0
    assert first in store.body("alice", first).decode()
    now_s = 3600.0
    with pytest.raises(RefusalError) as refused:
        store.body("alice", first)
    assert refused.value.status == 404
    assert store.conversation("alice", second) == [{"role": "assistant", "content": ""}]
    now_s = 6600.0
    store.expire()
    assert len(store) == 0


def test_the_store_is_bounded_and_the_one_with_most_gives_way() -> None:
    store = ResponseStore(most=4, most_bytes=10_000)
    bob = kept_rows(store, "bob")
    names = [kept_rows(store, "alice", size) for size in range(100, 108)]
    assert len(store) == 4
    assert store.body("bob", bob)
    for name in names[:-3]:
        with pytest.raises(RefusalError):
            store.body("alice", name)
    for name in names[-3:]:
        assert store.body("alice", name)
    large = kept_rows(store, "alice", 9_000)
    assert store.body("alice", large)
    alone_too_large = kept_rows(store, "alice", 11_000)
    with pytest.raises(RefusalError):
        store.body("alice", alone_too_large)
    other = kept_rows(store, "alice", 9_001)
    with pytest.raises(RefusalError):
        store.body("alice", large)
    assert store.body("alice", other)
    assert store.body("bob", bob)


def test_a_call_that_is_no_json_is_not_kept() -> None:
    store = ResponseStore()
    calls = (ToolCall("a", "move", '{"to": 1}'), ToolCall("b", "move", '{"to"'))
    store.store("alice", [], {"id": "resp"}, Turn("x", "y", calls))
    (message,) = store.conversation("alice", "resp")
    assert message["reasoning_content"] == "y"
    assert [call["id"] for call in message["tool_calls"]] == ["a"]
