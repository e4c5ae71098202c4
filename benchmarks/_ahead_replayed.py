"""Engines that replay: a target and a drafter that know what the real ones said, at any pace.

In:  a recording: each prompt's text by the real target alone (`stream`), and the drafter's best
     scores at each of its positions. Out: a `Decoder` for devices and, in `_ahead_edge.py`, a
     target for edges, which take a given time for a pass and compute nothing, so that two cores
     suffice for any number of them. All else is the product's own.

Behind a wrong draft the real drafter would say something; the replayed one says what it said at
that position. Neither can be accepted, since the edge checks what stands before.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from pilotfish import Device, EdgeServer
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder, Output, Pass
from tests.support.prefill import prefill

BEST = 8  # of the drafter's scores at each position
_LOW = -1e4  # all others
_NOTHING = np.empty((0, BEST), np.int64), np.empty((0, BEST), np.float32)
_PROMPT = 32  # a pass with more tokens of one session reads a prompt

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Recorded:
    """One prompt: its ids i64 [n] and the whole text [n + m]; ids and scores [m, BEST] of drafts.

    Row i of these is what the drafter says behind the first n + i tokens; there are none of a
    drafter of another vocabulary.
    """

    prompt: Ids
    text: Ids
    ids: Ids
    scores: NDArray[np.float32]

    def begins(self, tokens: Any) -> bool:
        """Whether these tokens are of this text, as far as the prompt goes."""
        return np.array_equal(tokens[: len(self.prompt)], self.prompt)

    def holds(self, tokens: Any) -> bool:
        """Whether the text begins with all these tokens."""
        return len(tokens) <= len(self.text) and np.array_equal(self.text[: len(tokens)], tokens)


@dataclass(frozen=True)
class Pace:
    """What a pass takes, in seconds: ``base_s``, and ``slope_s`` for each row but the first."""

    base_s: float
    slope_s: float = 0.0

    def of(self, rows: int) -> float:
        return self.base_s + self.slope_s * max(0, rows - 1)

    def __str__(self) -> str:
        more = f" + {1e3 * self.slope_s:g} S" if self.slope_s else ""
        return f"{1e3 * self.base_s:g}{more} ms"


def record(
    drafter: Path, target: Path, questions: Sequence[Any], tokens: int, temperature: float = 0.0
) -> list[Recorded]:
    """Let the real pair say it; the seed of each prompt is its number."""
    results = []
    with EdgeServer(target) as edge, Device(drafter, edge.endpoint) as device:
        for seed, result in enumerate(questions):
            prompt = device.prompt(result).ids.astype(np.int64)
            answer = device.generate(
                result, protocol="stream", temperature=temperature, seed=seed, max_tokens=tokens
            )
            text = np.concatenate([prompt, np.array(answer.tokens, np.int64)])
            results.append(Recorded(prompt, text, *_NOTHING))
        if not device.pair.trivial:
            return results  # a drafter with another vocabulary is not replayed
    reader = Decoder(drafter)
    return [_with_drafts(reader, result) for result in results]


def _with_drafts(reader: Decoder, recorded: Recorded) -> Recorded:
    reader.rollback(0, 0)
    logits = prefill(
        reader, 0, recorded.text[:-1], rows=len(recorded.text) - len(recorded.prompt)
    ).logits
    best = np.argsort(logits, axis=1)[:, : -BEST - 1 : -1]
    scores = np.take_along_axis(logits, best, axis=1)
    return Recorded(recorded.prompt, recorded.text, best.astype(np.int64), scores.copy())


def save(path: Path, recording: Sequence[Recorded]) -> Path:
    """Write a recording for another process."""
    arrays: dict[str, Any] = {}
    for at, item in enumerate(recording):
        for name in ("prompt", "text", "ids", "scores"):
            arrays[f"{name}-{at}"] = getattr(item, name)
    np.savez(path, **arrays)
    return path


def load(path: Path) -> list[Recorded]:
    """Read it there."""
    with np.load(path) as arrays:
        names = ("prompt", "text", "ids", "scores")
        count = len(arrays.files) // len(names)
        return [Recorded(*(arrays[f"{name}-{at}"] for name in names)) for at in range(count)]


class ReplayedDecoder:
    """The drafter's `Decoder`, as far as a device uses it, for chains."""

    def __init__(
        self, recording: Sequence[Recorded], pace: Pace, artifact: Artifact, slots: int = 1
    ) -> None:
        self._recording, self._pace = recording, pace
        dimensions = artifact.manifest.dimensions
        self.artifact, self.slots, self.provider = artifact, slots, "replayed"
        self.context, self.hidden_size = dimensions.context, dimensions.hidden
        self.vocab_size = artifact.manifest.vocab_size
        self._held = [np.empty(self.context, np.int64) for _ in range(slots)]
        self._lengths = [0] * slots
        self._recording_of = [0] * slots

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def rollback(self, slot: int, length: int) -> None:
        assert 0 <= length <= self._lengths[slot]
        self._lengths[slot] = length

    def forward(self, passes: Sequence[Pass]) -> list[Output]:
        """Sleep, and say what was said."""
        begun_s = time.perf_counter()
        outputs = [self._answer(each) for each in passes]
        parts = sum(-(-len(each.tokens) // _PROMPT) for each in passes)
        time.sleep(max(0.0, begun_s + parts * self._pace.base_s - time.perf_counter()))
        return outputs

    def _answer(self, passed: Pass) -> Output:
        assert passed.parents is None, "replayed drafters make chains"
        slot, tokens = passed.slot, np.asarray(passed.tokens)
        begin = self._lengths[slot]
        end = self._lengths[slot] = begin + len(tokens)
        held = self._held[slot]
        held[begin:end] = tokens
        rows = len(tokens) if passed.rows is None else passed.rows
        logits = np.full((rows, self.vocab_size), _LOW, np.float32)
        reply = self._recorded_answer(slot, held[:end])
        for row, place in enumerate(range(end - rows + 1, end + 1)):
            at = place - len(reply.prompt)
            if 0 <= at < len(reply.ids):
                logits[row, reply.ids[at]] = reply.scores[at]
        return Output(logits, np.zeros((rows, self.hidden_size), np.float32))

    def _recorded_answer(self, slot: int, tokens: Ids) -> Recorded:
        if not self._recording[self._recording_of[slot]].begins(tokens):
            fits = (at for at, item in enumerate(self._recording) if item.begins(tokens))
            self._recording_of[slot] = next(fits, self._recording_of[slot])
        return self._recording[self._recording_of[slot]]


@contextmanager
def replayed_drafters(recording: Sequence[Recorded], pace: Pace) -> Iterator[None]:
    """Devices that are opened meanwhile replay."""

    def opened(artifact: Artifact, *, slots: int, **_: object) -> ReplayedDecoder:
        return ReplayedDecoder(recording, pace, artifact, slots)

    with patch("pilotfish.engines.engine.open_model", opened):
        yield
