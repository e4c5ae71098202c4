"""Edges of another vocabulary: redirected to, come late, and what is kept of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import PairMismatchError
from pilotfish.device_runtime.choice import Evidence
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from tests.device_runtime.bridged_devices.asking import (
    GREEDY,
    TEXT,
    Models,
    opened,
    wanted_of,
)
from tests.device_runtime.test_link_loss import NOWHERE, await_true
from tests.support.relay import Relay


def test_redirected_to_another_vocabulary_and_back(
    models: Models, server: EdgeServer, other_server: EdgeServer
) -> None:
    with opened(models, other_server.endpoint) as device:
        there = device.generate(TEXT, **GREEDY).text
    with opened(models, server.endpoint, lanes=2) as device, device.beside() as neighbour:
        here = device.generate(TEXT, **GREEDY).text
        evidence = device.evidence
        prompt = device.prompt(TEXT)
        ids = device.prompt(device.tokenizer.encode(TEXT))
        assert here != there
        for endpoint, text in ((other_server.endpoint, there), (server.endpoint, here)) * 2:
            device.redirect(endpoint)
            # what was made of words is made anew, before or after the edge was met
            assert device.generate(prompt, **GREEDY).text == text
            assert device.generate(TEXT, **GREEDY).text == text
            assert neighbour.generate(prompt, **GREEDY).text == text
            assert device.prompt(TEXT).vocabulary == neighbour.prompt(TEXT).vocabulary
            assert device.tokenizer.decode(device.last.tokens) == text
            assert (device.evidence is evidence) == (text == here)
            assert neighbour.evidence is device.evidence
            if text == there:
                with pytest.raises(PairMismatchError, match="make the prompt again"):
                    device.generate(ids, **GREEDY)
            else:
                assert device.generate(ids, **GREEDY).tokens


def test_under_local_another_vocabulary_is_learned_before_anything_is_said(
    models: Models, server: EdgeServer, other_server: EdgeServer, strange_server: EdgeServer
) -> None:
    with opened(models, server.endpoint, "local") as device:
        device.generate(TEXT, **GREEDY)
        for edge, protocol in ((other_server, "greedy"), (strange_server, "local")):
            device.redirect(edge.endpoint)
            got = device.generate(TEXT, **GREEDY)
            assert {record.protocol for record in got.rounds} == {protocol}


def test_ids_are_never_taken_for_those_of_another_vocabulary(
    models: Models, server: EdgeServer, other_server: EdgeServer
) -> None:
    with opened(models, server.endpoint) as device:
        device.redirect(other_server.endpoint)
        with pytest.raises(PairMismatchError):  # they were given before it was met
            device.generate([1, 2, 3], **GREEDY)
        assert device.generate([1, 2, 3], **GREEDY).tokens


def test_what_was_learned_is_the_pairs(
    models: Models, server: EdgeServer, other_server: EdgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish: dict[str, Any] = {"protocol": "dsd", "temperature": 1.0, "max_tokens": 40}
    with opened(models, server.endpoint) as device:
        learning: list[tuple[str, Evidence]] = []
        add = Evidence.add

        def noted(self: Evidence, *what: Any) -> None:
            learning.append((device.prompt(TEXT).vocabulary, self))
            add(self, *what)

        monkeypatch.setattr(Evidence, "add", noted)
        for edge in (server, other_server, server, other_server):
            device.redirect(edge.endpoint)
            device.generate(TEXT, **wish)
            assert learning[-1][1] is device.evidence
        info = [vocabulary for vocabulary, _ in learning[-4:]]
        assert info[:2] == info[2:]
        assert info[0] != info[1]
        assert len({id(evidence) for _, evidence in learning}) == 2


@pytest.mark.parametrize("policy", ["wait", "local"])
def test_a_device_that_is_there_before_its_edge(
    models: Models, relay: Relay, server: EdgeServer, policy: str, empty_cache: Path
) -> None:
    relay.turn_to(NOWHERE)
    received: list[tuple[int, int]] = []
    with opened(models, relay.endpoint, policy, on_fetch=lambda *at: received.append(at)) as device:
        prompt = device.prompt(TEXT)
        if policy == "local":
            alone = device.generate(prompt, **GREEDY)
            assert {record.protocol for record in alone.rounds} == {"local"}
        coming = threading.Timer(0.3, relay.turn_to, [server.endpoint])
        coming.start()
        if policy == "local":
            coming.join()
            await_true(lambda: device.link_up)
            device.generate(prompt, protocol="greedy", max_tokens=1)  # in which the edge is greeted
        got = device.generate(prompt, **GREEDY)
        coming.join()
        assert {record.protocol for record in got.rounds} == {"greedy"}
        assert got.tokens == wanted_of(device, TEXT, GREEDY)
        size = len(Vocabulary.from_artifact(Artifact.open(models.target)).encode())
        assert received == [(size, size)]


def test_a_vocabulary_is_fetched_once(
    models: Models, server: EdgeServer, other_server: EdgeServer, empty_cache: Path
) -> None:
    received: list[tuple[int, int]] = []

    def open_(edge: EdgeServer) -> Device:
        return opened(models, edge.endpoint, lanes=2, on_fetch=lambda *at: received.append(at))

    with open_(server) as device:
        assert len(received) == 1
        with device.beside() as neighbour:
            neighbour.generate(TEXT, **GREEDY)
        device.generate(TEXT, **GREEDY)
        device.redirect(other_server.endpoint)
        device.generate(TEXT, **GREEDY)
        assert len(received) == 2
        device.redirect(server.endpoint)
        device.generate(TEXT, **GREEDY)
        assert len(received) == 2
    with open_(server) as device:  # as after a restart
        device.generate(TEXT, **GREEDY)
    assert len(received) == 2
    assert len([*(empty_cache / "vocabularies").iterdir()]) == 2
    assert len([*(empty_cache / "bridges").iterdir()]) == 2
