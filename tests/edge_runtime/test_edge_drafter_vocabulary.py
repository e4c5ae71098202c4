"""An edge's drafter that cannot predict all tokens of the target, or has another vocabulary."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pilotfish.base.errors import PairMismatchError
from pilotfish.edge_runtime.edge_config import EdgeConfig, EdgeLimits
from pilotfish.edge_runtime.edge_drafter import open_drafter
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.speculation.logits_options import LogitsOptions, LogitsProcessor
from tests.conftest import VOCAB, Pair
from tests.support.edge_drafting import FAR, GREEDY, PROMPT, drafted, drafting
from tests.support.prefill import prefill
from tests.support.serving import eventually
from tests.support.tiny import tiny_artifact


def test_a_drafter_with_a_cut_head_drafts_what_it_can_say(pair: Pair, tmp_path: Path) -> None:
    values = np.array([*range(0, VOCAB - 1, 3), VOCAB - 1])
    reply = tiny_artifact(tmp_path / "cut", vocab=VOCAB, seed=2, head_tokens=values.tolist())
    whole = Decoder(tiny_artifact(tmp_path / "whole", vocab=VOCAB, seed=2), threads=1)
    wanted = PROMPT
    for _ in range(4):
        whole.rollback(0, 0)
        logits = prefill(whole, 0, wanted.astype(np.int64)).logits[0]
        wanted = np.append(wanted, np.uint32(values[logits[values].argmax()]))
    with drafting(reply.path) as neighbour:
        trail = neighbour.follow(b"one", 0, PROMPT, GREEDY)
        trail.set_requested_end(FAR)
        assert drafted(trail, 4) == wanted[len(PROMPT) :].tolist()


class Only:
    """A grammar that allows one token, everywhere."""

    def __init__(self, token: int) -> None:
        self.token = token

    def forbid(self, logits: Any, answer: Any, paths: Any) -> list[int]:
        allowed = logits[:, self.token].copy()
        logits[:] = -np.inf
        logits[:, self.token] = allowed
        return []

    def forced(self, answer: Any, path: Any) -> list[int]:
        return []


def test_a_drafter_that_cannot_say_what_a_grammar_wants_rests(pair: Pair, tmp_path: Path) -> None:
    values = [*range(0, VOCAB - 1, 3), VOCAB - 1]
    cut = tiny_artifact(tmp_path / "cut", vocab=VOCAB, seed=2, head_tokens=values)
    grammar = Only(4)  # not in the head
    with drafting(cut.path) as neighbour:
        processor = LogitsProcessor(LogitsOptions(), len(PROMPT), grammar)
        trail = neighbour.follow(b"one", 0, PROMPT, GREEDY, processor)
        trail.set_requested_end(FAR)
        eventually(lambda: neighbour._metrics.drafter_passes)
        time.sleep(0.1)
        assert not trail.propose(FAR).ids
        assert neighbour._metrics.drafter_passes == 1  # it does not try the same text again
        grammar.token = 3
        trail.record_tokens([4])
        assert drafted(trail, 2) == [3, 3]


def test_a_drafter_of_another_vocabulary_is_refused(pair: Pair, tmp_path: Path) -> None:
    target = Artifact.open(pair.target).manifest
    tiny_artifact(tmp_path / "other", vocab=96, seed=1)
    config = EdgeConfig(target=pair.target, draft=pair.draft, limits=EdgeLimits(sessions=2))
    assert open_drafter(config, target).engine.model.slots == 2
    with pytest.raises(PairMismatchError, match="same family"):
        open_drafter(replace(config, draft=tmp_path / "other"), target)
