"""What callers in Python give as options: the types and bounds of `Request` and `Auto`."""

from __future__ import annotations

import time
from decimal import Decimal
from enum import Enum
from typing import Any

import numpy as np
import pytest

from pilotfish import Auto, Device
from pilotfish.base.errors import PilotfishError, UnsupportedError
from pilotfish.device_runtime.plan import plan
from pilotfish.speculation.logits_options import Grammar
from pilotfish.wire.protocols.adaptive import RelaxationOptions
from pilotfish.wire.request import AutoOptions, Request


class Name(str, Enum):
    """Names of a caller's own."""

    GREEDY = "greedy"


ODD: list[Any] = [
    *(b"x", True, 1.5, 2.0, [1], [[1]], {1: 2}, {"a": object()}, (), object(), Decimal("0.5")),
    *(1 + 2j, np.float32(0.5), np.array([1, 2]), np.array([0.5]), np.bool_(True), "x", None),
    *(10**30, -(10**30), float("nan"), "\ud800", Grammar("regex", "a"), int, lambda: 0),
]


def fault(options: dict[str, Any]) -> str:
    """Return the text of the error that these options raise; "" if they are accepted."""
    try:
        plan(Request.from_options(options))
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [*Request.__struct_fields__, "schema", "tau", "hints", "nothere"])
def test_every_fault_of_a_keyword_is_typed_and_names_it(name: str) -> None:
    faults = [fault({"protocol": "adaptive", "temperature": 1.0, name: value}) for value in ODD]
    texts = list(filter(None, faults))
    assert len(texts) > len(ODD) // 3
    if name not in ("protocol", "schema"):
        assert [text for text in texts if name not in text] == []


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"top_k": 1.5}, "Expected `int`, got `float` - at `top_k`."),
        ({"top_k": True}, "Expected `int`, got `bool` - at `top_k`."),
        ({"temperature": "0.5"}, "Expected `float | null`, got `str` - at `temperature`."),
        ({"window": True}, "Expected `int | str | null`, got `bool` - at `window`."),
        ({"stop": ["a", 1]}, "Expected `str`, got `int` - at `stop[1]`."),
        ({"stop": None}, "Expected `array`, got `null` - at `stop`."),
        ({"logit_bias": {"1": 1}}, "Expected `int`, got `str` - at `key` in `logit_bias`."),
        ({"grammar": Grammar("regex", 5)}, "Expected `str`, got `int` - at `grammar[1]`."),  # type: ignore[arg-type]  # refused, which is tested
        ({"options": {"tau": 0.5}}, "options must be a struct of a protocol's options, not {"),
        ({"auto": {"lossy": True}}, "auto must be an Auto, not {'lossy': True}."),
        ({"auto": AutoOptions(lossy="no")}, "Expected `bool`, got `str` - at `lossy`."),  # type: ignore[arg-type]  # refused, which is tested
        ({"nothere": None}, "There is no option 'nothere'."),
        ({"stop": ["a"] * 17}, "Expected `array` of length <= 16 - at `stop`."),
        ({"stop": "a" * 1025}, "Expected `str` of length <= 1024 - at `stop[0]`."),
        ({"expansion": [1] * 129}, "Expected `array` of length <= 128 - at `expansion`."),
        ({"max_tokens": 2**31}, "max_tokens must be between 1 and 2147483647, not 2147483648."),
        ({"schema": "\ud800"}, "The grammar is not valid Unicode: its character 0 is '\\ud800'"),
        ({"grammar": Grammar("regex", "a\udcff")}, "its character 1 is '\\udcff'"),
    ],
)
def test_texts_of_faults(keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        plan(Request.from_options({"protocol": "tree", "temperature": 1.0, **keywords}))
    assert text in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"lossy": "no"},
        {"thrift": 1},
        {"policy": 5},
        {"policy": ["predictive"]},
        {"among": 5},
        {"among": [1]},
        {"among": ["greedy"] * 129},
        {"among": []},
        {"rtt_threshold_s": "x", "policy": "threshold"},
        {"rtt_threshold_s": 1e9, "policy": "threshold"},
        {"rtt_threshold_s": np.float64("nan"), "policy": "threshold"},
    ],
)
def test_auto_checks_its_options(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="|".join([*options, "protocol"])):
        Auto(**options)


def test_numpys_values_and_enums_are_accepted() -> None:
    keywords: dict[str, Any] = {
        "protocol": Name.GREEDY,
        "top_k": np.int64(2),
        "top_p": np.float32(0.5),
        "expansion": np.array([2, 2]),
        "logit_bias": {np.int64(3): np.float32(1)},
        "stop": {"a"},
        "tau": np.float64(0.25),
        "grammar": Grammar("regex", "a"),
    }
    request = Request.from_options(keywords)
    assert (request.protocol, request.top_k, request.top_p) == ("greedy", 2, 0.5)
    assert (request.expansion, request.logit_bias) == ([2, 2], {3: 1.0})
    assert (request.stop, request.options) == (["a"], {"tau": 0.25})
    assert request.grammar == Grammar("regex", "a")
    assert type(request.grammar) is Grammar
    assert {type(request.top_k), type(request.top_p)} == {int, float}
    auto = Auto(rtt_threshold_s=np.float32(0.5), policy="threshold", among=("greedy", "stream"))
    assert type(auto.rtt_threshold_s) is float
    again = Request.from_options({"protocol": auto})
    assert isinstance(again.auto, Auto)
    assert again.auto == auto


def test_an_int_stays_an_int() -> None:
    """It is shorter in a message than the same float."""
    assert type(Request.from_options({"temperature": 1}).temperature) is int


def test_a_device_answers_after_faulty_options(device: Device) -> None:
    faults: list[dict[str, Any]] = [
        {"top_k": 1.5},
        {"draft_temperature": "0.5", "protocol": "tslt"},
        {"tools": 5},
        {"tools": [], "tool_choice": "x"},
        {"thinking": "x"},
        {"parallel_tool_calls": 1},
        {"options": RelaxationOptions(tau=object())},  # type: ignore[arg-type]  # refused, which is tested
        {"schema": "\ud800"},
        {"seed": np.array([1, 2])},
    ]
    for options in faults:
        with pytest.raises(PilotfishError):
            device.generate("ab", max_tokens=2, **options)
    for prompt in (None, 1, object()):
        with pytest.raises(UnsupportedError, match="prompt"):
            device.generate(prompt)  # type: ignore[arg-type]  # refused, which is tested
    with pytest.raises(UnsupportedError, match="temperature"):
        device.answer("ab", Request(temperature="x"))  # type: ignore[arg-type]  # refused, which is tested
    answer = device.generate("ab", max_tokens=np.int64(2), temperature=np.float32(0.5), seed=1)
    assert len(answer.tokens) == 2


def test_the_check_is_cheap() -> None:
    request = Request(protocol="greedy", seed=1)
    request.with_plain_types()
    spent_s = []
    for _ in range(50):
        begun_s = time.process_time()
        request.with_plain_types()
        spent_s.append(time.process_time() - begun_s)
    assert min(spent_s) < 1e-3
