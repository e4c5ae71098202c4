"""What both models say along the same texts: the rows that distributions are measured on.

The target answers each prompt alone, at temperature 1, and both models give their logits at every
token of its answer. What a round commits follows the target's law, so this is where drafts are made
and judged.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _common import PROMPTS, Steps
from numpy.typing import NDArray

from pilotfish import Device
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.speculation.distributions import Sampling, probabilities
from tests.support.prefill import prefill

SAMPLING = Sampling(temperature=1.0)


@dataclass(frozen=True, eq=False)
class Chat:
    """Logits of both models at n neighbouring positions of one answer.

    text: i64, the prompt and all of the answer but its last token. target, drafter: f32 [n, V].
    """

    text: NDArray[np.int64]
    target: NDArray[np.float32]
    drafter: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.target)

    def before(self, index: int) -> list[int]:
        """The tokens before one position."""
        ids: list[int] = self.text[: len(self.text) - len(self) + 1 + index].tolist()
        return ids

    def p(self, index: int) -> NDArray[np.float64]:
        """The target's distribution at one position, f64 [V]."""
        return _exact(self.target[index])

    def q(self, index: int) -> NDArray[np.float64]:
        """The drafter's distribution at one position, f64 [V]."""
        return _exact(self.drafter[index])


def _exact(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    # [V]; float64 so that bounds are not left by rounding
    exact: NDArray[np.float64] = probabilities(logits[None].astype(np.float64), SAMPLING)[0]
    return exact


def record(drafter: Path, target: Path, *, quick: bool, steps: Steps) -> list[Chat]:
    """A chat for each of `PROMPTS`, of which each is one of the steps."""
    length = 40 if quick else 96
    readers = Decoder(target), Decoder(drafter)
    chats = []
    with Device(target) as author:
        for seed, text in enumerate(PROMPTS):
            steps.next("recording an answer")
            prompt = author.prompt(text).ids.astype(np.int64)
            answer = author.generate(
                text, protocol="local", temperature=1.0, seed=seed, max_tokens=length
            ).tokens
            whole = np.concatenate([prompt, np.array(answer[:-1], dtype=np.int64)])
            logits = []
            for reader in readers:
                reader.rollback(0, 0)
                logits.append(prefill(reader, 0, whole, rows=len(answer)).logits.copy())
            chats.append(Chat(whole, *logits))
    return chats
