"""Where two texts of one answer part: at a tie of the target's scores, or at something else?"""

import codecs
from pathlib import Path

import numpy as np

from pilotfish import Device
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.edge_runtime.head_file import HeadCard, ModelIdentity, Training
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.speculation.randomness import Purpose, exponentials, noise
from tests.support.prefill import prefill

TIE = 1e-3  # in logits


def scores_at(reference: Decoder, ids: np.ndarray, seed: int | None) -> np.ndarray:
    """[V] f64, what the argmax is taken of behind these tokens, i64 [n].

    The target's logits; where there is a seed, with the Gumbel noise of that position.
    """
    reference.rollback(0, 0)
    scores = prefill(reference, 0, ids, rows=1).logits[0].astype(np.float64)
    if seed is not None:
        scores -= np.log(exponentials(noise(len(scores), seed, Purpose.TARGET, len(ids))))
    return scores


class Parting:
    """Judges texts of answers that a device gave, whose tokens are not known."""

    def __init__(self, drafter: Path, target: Path) -> None:
        self._device = Device(drafter)
        self._tokenizer = self._device.tokenizer
        self._reference = Decoder(target)
        self._ends = set(Artifact.open(target).manifest.eos_ids)

    def judge(self, prompt: str, wanted: str, got: str, seed: int | None) -> tuple[str, str]:
        """`tie` or `differ`, and where. The target's best tokens are followed until the texts part.

        A tie: the tokens that lead to either text have scores as good as the best, but for noise.
        """
        ids = list(self._device.prompt([{"role": "user", "content": prompt}]).ids)
        text, texts = b"", (wanted, got)
        while True:
            scores = scores_at(self._reference, np.array(ids, np.int64), seed)
            best = int(scores.argmax())
            if not all(self._leads(best, text, whole) for whole in texts):
                break
            if best in self._ends or len(text) > len(wanted.encode()):
                return "differ", "nowhere in the target's own text"
            text, ids = text + self._tokenizer.token_bytes(best), [*ids, best]
        near = np.flatnonzero(scores > scores[best] - TIE).tolist()
        tie = all(any(self._leads(item, text, whole) for item in near) for whole in texts)
        gap = float(scores[best] - np.sort(scores)[-2])
        where = f"behind {text.decode(errors='replace')[-30:]!r}, where the best two are {gap:.1e}"
        return "tie" if tie else "differ", f"{where} apart: {got!r} instead of {wanted!r}"

    def _leads(self, token: int, text: bytes, whole: str) -> bool:
        """Whether this token behind the text goes on to the whole."""
        if token in self._ends:
            return whole == text.decode("utf-8", "replace")
        begun = codecs.getincrementaldecoder("utf-8")("replace")  # the rest of a letter may follow
        decoded = begun.decode(text + self._tokenizer.token_bytes(token))
        return whole.startswith(decoded)


def random_head(drafter: Path, target: Path) -> DecisionHead:
    """A decision head that was not trained: as good as a coin, but always the same."""
    random, ends = np.random.default_rng(0), {}
    for role, path in (("drafter", drafter), ("target", target)):
        manifest = Artifact.open(path).manifest
        ends[role] = ModelIdentity(
            model=manifest.model,
            origin=manifest.origin,
            hidden=manifest.dimensions.hidden,
            precision=manifest.precision,
        )
    width, states = 8, sum(end.hidden for end in ends.values())
    tensors = {
        "mean": np.zeros(states),
        "std": np.ones(states),
        "w1": random.standard_normal((width, states)) / np.sqrt(states),
        "b1": random.standard_normal(width),
        "w2": random.standard_normal(width),
        "b2": np.zeros(1),
    }
    training = Training(questions=0, examples=0, task="random", seed=0)
    card = HeadCard(name="random", **ends, link=None, threshold=0.5, training=training)
    return DecisionHead(card, {name: each.astype(np.float32) for name, each in tensors.items()})
