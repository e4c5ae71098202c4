"""A link that breaks, and a drafter that is full: what was said goes on in the right tokens."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pilotfish import Device, EdgeServer, Piece
from pilotfish.base.errors import (
    EdgeLostError,
    PromptTooLongError,
)
from tests.device_runtime.bridged_devices.asking import (
    CONTEXT,
    COUPLED,
    GREEDY,
    TEXT,
    Models,
    opened,
    wanted_of,
)
from tests.device_runtime.test_link_loss import (
    await_true,
    lose,
    noticed_while_it_is_away,
    tokens_of,
)
from tests.support.relay import Relay


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
        got, alone = noticed_while_it_is_away(device, TEXT, wish, relay, server)
        first = next(at for at, piece in enumerate(got) if piece.origin == "local")
        assert tokens_of(got[:first]) == wanted[: len(tokens_of(got[:first]))]
        text = tokens_of(got[first : first + alone])
        known = {"a", "b", "c", "d", " ", ""}  # what both have; the end of neither is text
        assert {device.tokenizer.decode([token]) for token in text} <= known
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
