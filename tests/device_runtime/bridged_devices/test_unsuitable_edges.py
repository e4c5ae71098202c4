"""Edges that do not suit, or that hand out no vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import PairMismatchError
from pilotfish.engines.artifact import Artifact
from pilotfish.wire import messages as m
from tests.device_runtime.bridged_devices.asking import (
    GREEDY,
    TEXT,
    Models,
    opened,
)
from tests.device_runtime.test_bad_edge import LyingEdge
from tests.device_runtime.test_link_loss import await_true

HANDS_OUT_NOTHING = {"vocabulary": "", "vocabulary_bytes": 0}


@pytest.mark.parametrize("policy", ["fail", "wait"])
def test_an_edge_that_hands_out_no_vocabulary_is_refused(
    models: Models, liar: Callable[..., LyingEdge], policy: str, empty_cache: Path
) -> None:
    edge = liar(models.target, **HANDS_OUT_NOTHING)
    with (
        pytest.raises(PairMismatchError, match="does not offer this vocabulary"),
        opened(models, edge.endpoint, policy) as device,
    ):
        device.generate(TEXT, **GREEDY)
    assert {type(request) for request in edge.requests} <= {m.Hello, m.Close}


@pytest.mark.parametrize("changes", [HANDS_OUT_NOTHING, {}], ids=["nothing", "a stranger"])
def test_no_token_reaches_an_edge_of_another_vocabulary(
    models: Models,
    liar: Callable[..., LyingEdge],
    changes: dict[str, Any],
    strange_server: EdgeServer,
    empty_cache: Path,
) -> None:
    """Without the edge the drafter generates its own tokens, for itself alone."""
    if not changes:
        with pytest.raises(PairMismatchError, match="no token"):
            opened(models, strange_server.endpoint)
        path = empty_cache / "vocabularies"
        assert len([*path.iterdir()]) == 1
    edge = liar(models.strange if not changes else models.target, **changes)
    with opened(models, edge.endpoint, "local") as device:
        await_true(lambda: bool(edge.requests))
        for _ in range(2):
            got = device.generate(TEXT, **GREEDY)
            assert {record.protocol for record in got.rounds} == {"local"}
            assert got.text == device.tokenizer.decode(got.tokens)
        assert (
            device.tokenizer.fingerprint
            == Artifact.open(models.draft).manifest.tokenizer_fingerprint
        )
        with Device(models.draft, threads=1) as alone:
            assert alone.generate(TEXT, **{**GREEDY, "protocol": "local"}).tokens == got.tokens
    assert {type(request) for request in edge.requests} <= {m.Hello, m.Cancel, m.Close, m.Ping}


def test_a_lane_that_cannot_be_opened_leaves_nothing_behind(
    models: Models, server: EdgeServer, strange_server: EdgeServer
) -> None:
    with opened(models, server.endpoint, lanes=2) as device:
        wanted = device.generate(TEXT, **GREEDY).tokens
        device.redirect(strange_server.endpoint)
        with pytest.raises(PairMismatchError):
            device.beside()
        assert len(device._link_group._links) == 1
        device.redirect(server.endpoint)
        with device.beside() as other:
            assert other.generate(TEXT, **GREEDY).tokens == wanted
        assert device.generate(TEXT, **GREEDY).tokens == wanted


def test_an_edge_that_names_no_vocabulary(models: Models, liar: Callable[..., LyingEdge]) -> None:
    """It is not taken for the drafter's."""
    edge = liar(models.draft, tokenizer="", **HANDS_OUT_NOTHING)
    with pytest.raises(PairMismatchError, match="does not offer"):
        opened(models, edge.endpoint)


def test_an_edge_that_does_not_offer_the_drafters_own_vocabulary(
    models: Models, liar: Callable[..., LyingEdge]
) -> None:
    edge = liar(models.draft, **HANDS_OUT_NOTHING)
    with opened(models, edge.endpoint) as device:
        assert device.tokenizer.fingerprint == device.prompt(TEXT).vocabulary
        assert device.prompt(TEXT).draft_ids.tolist() == device.prompt(TEXT).ids.tolist()
    assert not any(isinstance(request, m.Fetch) for request in edge.requests)
