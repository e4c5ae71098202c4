"""The net: texts and costs of all protocols equal the records in tests/data/net.json.

The records have texts of all protocols. Of protocols with rounds they also have target passes, the
positions that these read, and each round's tokens and bytes, as far as no clock decides them. The
tests use only what outlives changes of structure: `Device`, `EdgeServer`, `Generation`, the edge's
metrics, and the bytes on the wire.

After an intended change, record again and review the diff, which has one line for each case; WORDS
choose the cases with one of them in their names:

    python -m tests.system.test_net --record [WORDS]
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Grammar
from pilotfish.device_runtime import link_renewal
from pilotfish.wire.protocols import PROTOCOL_REGISTRY
from tests.support.net import TURNS, Case, Net
from tests.support.registered import serves
from tests.support.writing import OBJECT

RECORDS = Path(__file__).parents[1] / "data" / "net.json"
COLD: dict[str, Any] = {"temperature": 0.0}
WARM: dict[str, Any] = {"temperature": 1.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "schema": {"schema": OBJECT, "max_tokens": 60},
    "lark": {"grammar": Grammar("lark", 'start: n ("+" n){1,3}\nn: /[0-9]{1,2}/')},
    "stop": {"stop": ["f", "1"]},
    "bias": {"logit_bias": {7: 2.0, 12: -100.0, 30: 1.5}},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
}
EXPANSIONS = ((2, 2, 1), (3, 1), (1, 4))


def temperatures(protocol: str) -> list[dict[str, Any]]:
    """List the temperatures that a protocol can serve."""
    exchange = PROTOCOL_REGISTRY.get(protocol)
    return [each for each in (COLD, WARM) if exchange is None or serves(exchange, **each)]


def cases() -> Iterator[tuple[str, Case]]:
    """Yield the cases of all protocols, each with its name."""
    for protocol in [*PROTOCOL_REGISTRY, "stream", "local"]:
        for heat in temperatures(protocol):
            name = f"{protocol} T{heat['temperature']:g}"
            options = {"protocol": protocol, "max_tokens": 24, "window": 3, **heat}
            yield from ((f"{name} {words}", case) for words, case in cases_of(protocol, options))


def cases_of(protocol: str, options: dict[str, Any]) -> Iterator[tuple[str, Case]]:
    """Yield the cases of a protocol at a temperature."""
    exchange = PROTOCOL_REGISTRY.get(protocol)
    windows = (2, 5, "auto") if exchange is not None and not exchange.streams else (3,)
    for seed, window in product((1, 2), windows):
        both = {"seed": seed, "window": window}
        yield f"seed {seed} window {window}", Case("plain", seed, options | both)
    for seed, (variant, more) in enumerate(VARIANTS.items()):
        yield variant, Case("plain", 1 + seed % 2, options | {"seed": seed} | more)
    yield "chat", Case("plain", 3, options | {"seed": 5})
    yield "long prompt", Case("plain", 4, options | {"seed": 5, "max_tokens": 8})
    yield "after dssd", Case("after", 1, options | {"seed": 9})
    for turn in range(len(TURNS)):
        yield f"turn {turn}", Case("turns", turn, options | {"seed": 9, "max_tokens": 8})
    if exchange is not None:
        yield from cases_of_drafts(protocol, options)
    if protocol != "local":
        yield "cut", Case("cut", 1, options | {"seed": 10, "max_tokens": 40})
        yield "killed", Case("killed", 2, options | {"seed": 11, "max_tokens": 40})


def cases_of_drafts(protocol: str, options: dict[str, Any]) -> Iterator[tuple[str, Case]]:
    """Yield the cases that are about drafters and the shape of drafts."""
    if options["temperature"]:
        fields = {"draft_temperature": 0.5, "draft_top_k": 6, "seed": 4}
        yield "drafter's own sampling", Case("plain", 2, options | fields)
    if protocol == "tree":
        for expansion in EXPANSIONS:
            tree = options | {"window": None, "expansion": expansion, "seed": 3}
            yield f"expansion {expansion}", Case("plain", 1, tree)
    if protocol == "ahead":
        for hints in ("edge", "device"):
            yield f"hints {hints}", Case("plain", 1, options | {"seed": 8, "hints": hints})
    if PROTOCOL_REGISTRY[protocol].requires:  # a decision head is for one drafter
        return
    yield "across", Case("across", 3, options | {"seed": 6})
    yield "across lark", Case("across", 1, options | {"seed": 6} | VARIANTS["lark"])
    if protocol != "tree":
        yield "text drafter", Case("text", 4, options | {"seed": 7})


# Cases with costs come first: an edge may still work for an answer of `stream` that was cut short.
# Kills come last: all devices have to come back after one.
CASES = dict(sorted(cases(), key=lambda each: (not each[1].has_costs, each[1].setup == "killed")))


@pytest.fixture(autouse=True)
def steady_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell no head a change of the link: when a busy machine changes it is chance."""
    monkeypatch.setattr(link_renewal, "_EVERY_S", math.inf)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    with closing(Net(tmp_path_factory.mktemp("net"), CASES)) as net:
        yield net


@pytest.fixture(scope="module")
def records() -> dict[str, Any]:
    return json.loads(RECORDS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_as_recorded(net: Net, records: dict[str, Any], name: str) -> None:
    assert net.record(name) == records[name]


def test_no_record_is_without_a_case(records: dict[str, Any]) -> None:
    assert sorted(records) == sorted(CASES)


def main(words: Sequence[str]) -> None:
    """Record the cases with one of these words in their names; without words, all."""
    records = json.loads(RECORDS.read_text(encoding="utf-8")) if words else {}
    records = {name: record for name, record in records.items() if name in CASES}
    with tempfile.TemporaryDirectory() as folder, closing(Net(Path(folder), CASES)) as net:
        for name in CASES:
            if not words or any(word in name for word in words):
                records[name] = net.record(name)
    lines = (
        f"{json.dumps(name)}: {json.dumps(records[name], sort_keys=True, ensure_ascii=False)}"
        for name in sorted(records)
    )
    RECORDS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--record"]:
        sys.exit(__doc__)
    main(sys.argv[2:])
