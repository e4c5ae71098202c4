"""What the text knows is told to the edge at once, though the text knows nothing further."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from pilotfish.bridge import TrivialBridge
from pilotfish.device_runtime.forerunner import Forerunner
from pilotfish.device_runtime.texts.text_memory import TextMemory
from pilotfish.drafting.ahead import PassAcceptance
from pilotfish.drafting.lookup import Recollection
from pilotfish.drafting.text_drafter import TextDrafter
from pilotfish.wire.codecs.ids import decode_ids
from pilotfish.wire.protocols.ahead import DEVICE
from tests.support.plans import plan

PROMPT = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.uint32)


class Sent:
    """An edge that only notes its hints."""

    incarnation = 1
    limits = SimpleNamespace(window=64)

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.token_s = 0.0  # unknown

    def hint(self, *info: Any) -> int:
        self.frames.append(info)
        return 1


def runner_to(edge: Sent, known: int) -> Forerunner:
    """A forerunner whose drafter knows how the text goes on, up to a place."""
    memory = TextMemory()
    for _ in range(3):
        memory.texts("words", 64).add(np.arange(1, known + 1, dtype=np.uint32))
    drafter = TextDrafter(Recollection(memory))
    drafter.set_bridge(TrivialBridge(64), "words")
    drafter._recall.start("words", 64)
    drafter._recall.update(PROMPT[:4])
    for end in range(5, 9):  # so that long matches are trusted
        drafter._recall.update(PROMPT[:end])
    return Forerunner(
        drafter,
        edge,
        plan(protocol="ahead", temperature=0.0),
        PassAcceptance(),
        PROMPT,
        None,
        last=100,
        ends=(),
    )


def test_drafts_before_an_unknown_place_are_told() -> None:
    edge = Sent()
    runner = runner_to(edge, 12)
    runner._pass_s = 10.0  # of a pass of the target's: hints are far between
    while runner.step():
        pass
    assert runner._ahead.drafts.tolist() == [9, 10, 11, 12]
    assert runner._ahead.unsent == 0


def test_on_a_link_that_stands_still_few_hints_pile_up() -> None:
    """What is drafted beyond them goes along once a token has come."""
    edge = Sent()
    runner = runner_to(edge, 20)
    while runner.step():
        pass
    assert len(edge.frames) == 4
    runner.record_tokens([9], DEVICE, 0.01)
    runner.step()
    (start, _, (ids, _)) = edge.frames[4]
    assert start == 12
    assert decode_ids(ids, 64).tolist() == [*range(13, 21)]
