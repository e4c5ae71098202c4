"""The options of a request cross in `begin`, each once, and come out as they went in."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import pytest

from pilotfish.base.errors import MalformedError, TooLargeError, UnsupportedError
from pilotfish.base.settings import setting, settings
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.logits_options import Grammar, LogitsOptions
from pilotfish.wire import begin as begin_module
from pilotfish.wire.begin import begin_fields, read_begin
from pilotfish.wire.messages import (
    MAX_GRAMMAR,
    Begin,
    LogitsOptionsMsg,
    decode_device_message,
    encode,
)
from pilotfish.wire.request import Request

SESSION = {"session": bytes(16), "generation": 0, "keep": 0, "hash": bytes(8)}
FULL = Request(
    protocol="tslt",
    seed=2**63 - 1,
    temperature=0.75,
    top_k=7,
    top_p=0.5,
    min_p=0.25,
    logit_bias={3: -1.5, 1: 2.0},
    repetition_penalty=1.5,
    frequency_penalty=-0.5,
    presence_penalty=0.25,
    grammar=Grammar("regex", "ä+"),
    options={"tau": 0.5},
    logprobs=3,
    prompt_logprobs=0,
)


class Longer(Request, frozen=True, kw_only=True):
    """A request with an option that `Begin` has no field for."""

    top_h: Annotated[int, setting("", ge=0, le=64, wire=True)] = 0


@pytest.fixture
def longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(begin_module, "Request", Longer)
    monkeypatch.setattr(begin_module, "_MappedOptions", begin_module._mapped_options(Longer))


def crossed(request: Request, **changes: Any) -> Begin:
    """The `Begin` of a request, as the edge decodes it."""
    message = Begin(**SESSION, **{**begin_fields(request, 5), **changes})
    received = decode_device_message(encode(message))
    assert isinstance(received, Begin)
    return received


@pytest.mark.parametrize("request_", [FULL, Request(protocol="stream", seed=0)])
def test_a_request_comes_out_as_it_went_in(request_: Request) -> None:
    grammar = None if request_.grammar is None else request_.grammar.text.encode()
    received, parameters = read_begin(crossed(request_), grammar)
    assert received == request_
    assert parameters.sampling == request_.sampling
    assert parameters.logits_options == request_.logits_options
    assert parameters.seed == request_.seed


def test_each_parameter_of_sampling_crosses() -> None:
    plain = {*Begin.__struct_fields__, *LogitsOptionsMsg.__struct_fields__}
    mapped = {option.name for option in settings(Request) if option.extra.get("wire")}
    for kind in (Sampling, LogitsOptions):
        names = {field.name for field in fields(kind)}
        assert names <= {*Request.__struct_fields__}
        assert names <= plain | mapped, f"mark {names - plain - mapped} in Request by wire=True"
    assert not plain & mapped


@pytest.mark.usefixtures("longer")
def test_an_option_without_a_field_crosses_in_the_map_if_it_is_set() -> None:
    request_ = Longer(protocol="adaptive", seed=1, top_h=3, options={"tau": 0.5})
    message = crossed(request_)
    assert message.options == {"tau": 0.5, "top_h": 3}
    assert read_begin(message, None)[0] == request_
    unset = crossed(Longer(protocol="adaptive", seed=1, options={"tau": 0.5}))
    assert unset.options == {"tau": 0.5}
    assert read_begin(unset, None)[0].options == {"tau": 0.5}


@pytest.mark.usefixtures("longer")
@pytest.mark.parametrize("value", [-1, 65, "3", None, 1.5, [1], {"a": 1}, True])
def test_a_bad_value_in_the_map_is_malformed(value: Any) -> None:
    message = crossed(Longer(protocol="greedy", seed=1), options={"top_h": value})
    with pytest.raises(MalformedError, match="top_h"):
        read_begin(message, None)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"temperature": -1.0}, "sampling parameters are unusable: temperature"),
        ({"top_p": 0.0}, "sampling parameters are unusable: top_p"),
        ({"min_p": float("nan")}, "sampling parameters are unusable: min_p"),
        ({"shape": LogitsOptionsMsg(since=0, repetition_penalty=0.0)}, "repetition_penalty"),
        ({"shape": LogitsOptionsMsg(since=0, logit_bias=[(1, 1.0), (1, 2.0)])}, "token twice"),
    ],
)
def test_impossible_parameters_are_malformed(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(MalformedError, match=text):
        read_begin(crossed(Request(protocol="greedy", seed=1), **changes), None)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"top_h": -1}, "top_h must be between 0 and 64, not -1."),
        ({"top_h": 65}, "top_h must be between 0 and 64, not 65."),
        ({"max_tokens": 0}, "max_tokens must be between 1 and 2147483647, not 0."),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, not 21."),
        ({"draft_top_p": 0.0}, "draft_top_p must be above 0 and at most 1, not 0.0."),
        ({"min_p": float("nan")}, "min_p must be between 0 and 1, not nan."),
    ],
)
def test_the_bounds_of_a_field_are_checked(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        Longer(**changes).check_bounds()
    assert str(refused.value) == text
    Longer(top_h=64, max_tokens=None, draft_top_p=1.0, logprobs=20).check_bounds()


def test_a_grammar_is_text_of_limited_length() -> None:
    message = crossed(FULL)
    with pytest.raises(MalformedError, match="UTF-8"):
        read_begin(message, b"\xff")
    with pytest.raises(TooLargeError, match="65537 bytes"):
        read_begin(message, b"a" * (MAX_GRAMMAR + 1))
