"""The temperature of a request that states none: one rule for service, bodies and Python."""

from __future__ import annotations

from typing import Any

import pytest

from pilotfish import Device
from pilotfish.base.errors import UnsupportedError
from pilotfish.cli import main
from pilotfish.device_runtime.choice import POLICIES
from pilotfish.device_runtime.default_temperature import (
    greedy_names,
    with_default_temperature,
)
from pilotfish.device_runtime.plan import Auto
from pilotfish.device_runtime.service.openai import chat_request, text_request
from pilotfish.device_runtime.service.responses import response_request
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, names
from pilotfish.wire.request import Request
from tests.support.plans import plan

THRESHOLD = Auto(lossy=True, policy="threshold")
GREEDY = ("greedy", "wisv-full", "wisv-selective")
SAMPLED = ("dsd", "tslt", "tree", "dssd", "coupled", "ahead", "adaptive", "stream", "local")


def auto(**options: Any) -> Request:
    return Request(protocol="auto", auto=Auto(**options), temperature=None)


@pytest.mark.parametrize(
    ("request_", "temperature"),
    [
        *((Request(protocol=name, temperature=None), 0.0) for name in GREEDY),
        *((Request(protocol=name, temperature=None), 1.0) for name in SAMPLED),
        (Request(protocol=None, temperature=None), 1.0),
        (auto(), 1.0),
        (auto(lossy=True), 1.0),
        (auto(lossy=True, policy="threshold"), 0.0),
        (auto(policy="threshold"), 0.0),  # refused later, for another reason
        (auto(among=["wisv-full", "wisv-selective"], policy="threshold"), 0.0),
        (auto(among=["wisv-full", "adaptive"], policy="threshold"), 0.0),
        (auto(among=["wisv-full", "greedy"]), 0.0),
        (auto(among=["greedy", "stream"]), 0.0),  # only at 0 may greedy be chosen
        (auto(among=["stream", "local"]), 1.0),
        (auto(among=["greedy", "dsd"]), 1.0),
        (auto(policy="nothere"), 1.0),
        (Request(protocol="nothere", temperature=None), 1.0),
    ],
)
def test_it_is_1_or_0_where_nothing_else_can_be(request_: Request, temperature: float) -> None:
    assert with_default_temperature(request_).temperature == temperature


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_stated_temperature_stays(temperature: float) -> None:
    for protocol in (*names(), "auto"):
        request = Request(protocol=protocol, auto=THRESHOLD, temperature=temperature)
        assert with_default_temperature(request) == request


def test_the_protocols_that_are_called_greedy_are_those_that_refuse_to_sample() -> None:
    def refuses(name: str) -> bool:
        try:
            plan(protocol=name, temperature=0.5)
        except UnsupportedError as error:
            return f"Protocol {name} decodes at temperature 0, not 0.5" in str(error)
        return False

    refused = [name for name in PROTOCOL_REGISTRY if refuses(name)]
    assert refused == [name for name, each in PROTOCOL_REGISTRY.items() if each.greedy_only]
    assert {*GREEDY} <= {*refused}
    assert {*SAMPLED}.isdisjoint(refused)
    assert [*greedy_names()] == [*refused, "policy threshold"]
    for policy in POLICIES.values():
        assert all(name in PROTOCOL_REGISTRY for name in policy.protocols)


# Over HTTP

UNSTATED = Request(protocol="auto", auto=THRESHOLD, temperature=None)


@pytest.mark.parametrize(
    ("defaults", "fields", "temperature"),
    [
        (UNSTATED, b"", 0.0),
        (UNSTATED, b', "temperature": null', 0.0),
        (UNSTATED, b', "temperature": 0.7', 0.7),  # and is refused when it is planned
        (UNSTATED, b', "pilotfish": {"protocol": "coupled"}', 1.0),
        (UNSTATED, b', "pilotfish": {"threshold": 0.4}', 0.0),
        (Request(protocol="auto", temperature=None), b"", 1.0),
        (
            Request(protocol="auto", temperature=None),
            b', "pilotfish": {"lossy": true, "policy": "threshold"}',
            0.0,
        ),
        (Request(protocol="auto", temperature=None), b', "pilotfish": {"protocol": "greedy"}', 0.0),
        # the service's --temperature is the default of each request
        (Request(protocol="auto", temperature=0.6), b', "pilotfish": {"protocol": "dsd"}', 0.6),
        (Request(protocol="auto", auto=THRESHOLD, temperature=0.6), b"", 0.6),
        (Request(protocol="coupled", temperature=0.0), b"", 0.0),
    ],
)
def test_a_body_without_a_temperature(defaults: Request, fields: bytes, temperature: float) -> None:
    text = text_request(b'{"prompt": "a"' + fields + b"}", defaults).request
    messages = b'{"messages": [{"role": "user", "content": "a"}]'
    chat = chat_request(messages + fields + b"}", defaults).request
    response = response_request(b'{"input": "a"' + fields + b"}", defaults, lambda _: [])
    temperatures = (text.temperature, chat.temperature, response.completion.request.temperature)
    assert temperatures == (temperature,) * 3


@pytest.mark.parametrize(
    ("defaults", "fields"),
    [
        (Request(protocol="auto", temperature=None), b', "temperature": 0.6'),
        (Request(protocol="auto", temperature=0.6), b""),
    ],
)
def test_a_stated_temperature_is_still_refused(defaults: Request, fields: bytes) -> None:
    body = b'{"prompt": "a", "pilotfish": {"protocol": "wisv-full"}' + fields + b"}"
    with pytest.raises(UnsupportedError, match=r"decodes at temperature 0, not 0\.6"):
        text_request(body, defaults)


# In Python, and on the command line


def test_python_may_leave_it_open(device: Device) -> None:
    prompt, drawn = [1, 2, 3], {"seed": 5, "max_tokens": 16}
    for protocol, temperature in (("greedy", 0.0), ("coupled", 1.0)):
        options: dict[str, Any] = {"protocol": protocol, **drawn}
        wanted = device.generate(prompt, temperature=temperature, **options).tokens
        assert device.generate(prompt, temperature=None, **options).tokens == wanted


def test_the_help_of_the_service_says_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main(["device", "serve", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert (
        "(default: 1, as in OpenAI's API; 0 under greedy, wisv-full, wisv-selective and policy "
        "threshold, which decode at temperature 0 alone)" in words
    )
