"""Federations of models in this process, and what they say: texts and all logits along them.

A federation writes its own answers, sampled from the uncompressed average of its workers, so they
are what rounds over it would commit (specfed §V-A).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.ensemble import aggregate, top_rows
from pilotfish.speculation.randomness import Purpose, noise, sample
from tests.support.prefill import prefill

CONTEXT = 1024


@dataclass(frozen=True)
class Federation:
    """Workers' artifacts and weights."""

    name: str
    workers: Sequence[Path]
    weights: Sequence[float]


@dataclass(frozen=True, eq=False)
class Window:
    """Logits at n neighbouring positions, f32 [n, V]: of each worker, and of the drafter."""

    workers: Sequence[NDArray[np.float32]]
    drafter: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.drafter)


class Authors:
    """The workers of a federation, and a drafter that reads along."""

    def __init__(self, federation: Federation, drafter: Path) -> None:
        self._weights = federation.weights
        self._workers = [Decoder(path, context=CONTEXT) for path in federation.workers]
        self._drafter = Decoder(drafter, context=CONTEXT)
        self._vocabulary = Vocabulary.from_artifact(Artifact.open(federation.workers[0]))
        self.vocab = self._vocabulary.vocab_size

    def write(
        self, prompt: str, temperature: float, seed: int, *, most: int, positions: int
    ) -> Iterator[Window]:
        """An answer of at most so many tokens, in windows of so many positions."""
        wanted = self._read(prompt)
        fresh, reply = wanted, list[int]()
        rows: list[list[NDArray[np.float32]]] = []
        for model in (*self._workers, self._drafter):
            model.rollback(0, 0)
        while len(reply) < most and not (reply and reply[-1] in self._vocabulary.eos_ids):
            rows.append([prefill(worker, 0, fresh).logits[0].copy() for worker in self._workers])
            whole = [top_rows(row[None], temperature, self.vocab) for row in rows[-1]]
            p = aggregate(self._weights, whole, self.vocab, "renormalise")[0]
            reply.append(sample(p, noise(self.vocab, seed, Purpose.TARGET, len(reply))))
            fresh = np.array(reply[-1:])
        text = np.concatenate([wanted, np.array(reply[:-1], np.int64)])
        drafted = prefill(self._drafter, 0, text, rows=len(reply)).logits
        for first in range(0, len(reply), positions):
            part = slice(first, first + positions)
            yield Window([np.stack(each) for each in zip(*rows[part], strict=True)], drafted[part])

    def _read(self, prompt: str) -> NDArray[np.int64]:
        """A prompt's ids, as a user's message if the model knows such."""
        vocabulary, text = self._vocabulary, prompt
        if vocabulary.template:
            message = [{"role": "user", "content": prompt}]
            text = vocabulary.template.render(message, add_generation_prompt=True)
        return np.array(vocabulary.tokenizer.encode(text, special=True), np.int64)
