"""What wisv refuses: senseless options, at either end, and drafters that no head was made for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import UnsupportedError
from tests.conftest import PADDED_VOCAB, VOCAB, Pair
from tests.support.hostile import PROMPT, RawClient, RawSession
from tests.support.judging import conditions_of
from tests.support.tiny import tiny_artifact

PROTOCOLS = ("wisv-full", "wisv-selective")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 1.0}, "temperature 0"),
        ({"draft_temperature": 0.5}, "temperature 0"),
        ({"threshold": -0.01}, "threshold"),
        ({"threshold": 1.01}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"hidden": "int2"}, "int8, fp16, int4"),
        ({"expansion": (2, 1)}, "chain"),
    ],
)
def test_senseless_options(
    device: Device, protocol: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        device.generate(PROMPT, protocol=protocol, **options)
    assert device.generate(PROMPT, protocol=protocol, max_tokens=3).tokens


def test_the_edge_refuses_them_too(pair: Pair, edge: EdgeServer) -> None:
    with RawClient(edge.endpoint) as client:
        for protocol in PROTOCOLS:
            session = RawSession(conditions=conditions_of(pair))
            client.send(*session.begin(PROMPT, protocol, temperature=1.0))
            client.fails("unsupported")
            for threshold in (-0.01, 1.01, float("nan"), float("inf")):
                bad = {"threshold": threshold}
                client.send(*session.begin(PROMPT, protocol, options=bad))
                client.fails("malformed")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_head_for_the_drafter(
    pair: Pair, edge: EdgeServer, device: Device, protocol: str, tmp_path: Path
) -> None:
    """The welcome does not offer such protocols, and a request for one fails with advice."""
    assert device.welcome is not None
    assert {*PROTOCOLS} <= {*device.welcome.protocols}
    stranger = tiny_artifact(tmp_path / "stranger", vocab=VOCAB, padded_vocab=PADDED_VOCAB).path
    with EdgeServer(pair.target, threads=1) as without:
        for draft, server in ((pair.draft, without), (stranger, edge)):
            with Device(draft, server.endpoint, threads=1) as other:
                assert other.welcome is not None
                assert not {*PROTOCOLS} & {*other.welcome.protocols}
                with pytest.raises(UnsupportedError, match="--head"):
                    other.generate(PROMPT, protocol=protocol, max_tokens=5)
                assert other.generate(PROMPT, protocol="greedy", max_tokens=5).tokens
