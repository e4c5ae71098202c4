"""Judge with a decision head (wisv §V-A) whether a mismatch is harmless.

In:  for each of m mismatches: the last-layer states h_D of the drafter and h_T of the target at the
     draft token's position, and the ids of both tokens; for all, the link's features c.
Out: the logit z of the rejection probability ρ = σ(z), with z = w2·ReLU(w1·u + b1) + b2 and
     u = [h_D ; h_T ; c], standardised as in training (wisv (23)-(25)). A `HeadJudge` returns
     whether each mismatch is rejected at a threshold of ρ (wisv (27)).

A head is trained for one pair of models and refused for other pairs (`check_target`, `supports`).
"""

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import HeadError, PairMismatchError
from pilotfish.edge_runtime.head_file import (
    DEFAULT_HEAD,
    SHIPPED_HEADS,
    HeadCard,
    Tensors,
    check_tensors,
    read_head,
    validate_card,
    write_head,
)
from pilotfish.engines.manifest import Manifest
from pilotfish.speculation.channel import Channel
from pilotfish.wire.codecs.hidden import HiddenFormat

_log = logging.getLogger("pilotfish.edge")
_SINGLE_THREAD = 1 << 18  # number of multiplications up to which OpenBLAS uses one thread

Score = Callable[
    [NDArray[np.floating], NDArray[np.floating], NDArray[np.integer]], NDArray[np.float32]
]


def token_buckets(tokens: NDArray[np.integer], buckets: int) -> NDArray[np.int64]:
    """Hash each token id to a bucket, 0 to ``buckets`` − 1; the result has the shape of ``tokens``.

    The hash is Knuth's multiplicative hash: the fractional part of id·2654435761 / 2³², times the
    number of buckets.
    """
    spread = tokens.astype(np.uint64) * np.uint64(2654435761) & np.uint64(0xFFFFFFFF)
    scaled: NDArray[np.uint64] = spread * np.uint64(buckets) >> np.uint64(32)
    return scaled.astype(np.int64)


@dataclass(frozen=True, eq=False)
class HeadJudge:
    """Decision head, bound to one request's link and threshold. Thread-safe.

    width: size d of a drafter's state. form: wire format of these states. bound: logit of the
    threshold. score: function from mismatches to logits z (arguments of `DecisionHead.logits`).
    bind: returns this function for another link.
    """

    width: int
    form: HiddenFormat
    bound: float
    score: Score
    bind: Callable[[Channel], Score]

    def with_channel(self, channel: Channel) -> "HeadJudge":
        """Return the same head and threshold, bound to another state of the link."""
        return replace(self, score=self.bind(channel))

    @property
    def outcome(self) -> bool | None:
        """Whether every mismatch is rejected, at thresholds 0 and 1; None: the score decides."""
        return self.bound < 0 if math.isinf(self.bound) else None

    def __call__(
        self,
        drafter: NDArray[np.floating],
        target: NDArray[np.floating],
        tokens: NDArray[np.integer],
    ) -> NDArray[np.bool_]:
        """Return whether to reject each mismatch, bool [m]; arguments as for `DecisionHead.logits`.

        A mismatch is also rejected if its states overflow, except at threshold 1.
        """
        if self.outcome is not None:
            return np.full(len(tokens), self.outcome)
        logits = self.score(drafter, target, tokens).astype(np.float64)
        return (logits > self.bound) | ~np.isfinite(logits)


class DecisionHead:
    """Two-layer decision head with its card.

    card: identity and settings of the head. tensors: its weights, as in the file
    (`edge_runtime.head_file`). Raises `HeadError` if card and tensors do not fit together.
    """

    def __init__(self, card: HeadCard, tensors: Tensors) -> None:
        self.card = validate_card(card)
        check_tensors(self.card, tensors)
        self.tensors = tensors
        self._fold()
        self._warned = False

    @classmethod
    def load(cls, name: str) -> "DecisionHead":
        """Load the head at the path NAME.json or NAME, or the shipped head: "default".

        Raises:
            HeadError: if there is no head, or if its files are damaged or too large.
        """
        path = _card_path(name)
        if cls.is_shipped(name):
            path = SHIPPED_HEADS / path
        if not os.path.exists(path):  # Path.exists raises for a name that is too long
            raise HeadError(f"There is no decision head {name}: give the path of its .json file.")
        return cls(*read_head(path))

    @staticmethod
    def is_shipped(name: str) -> bool:
        """Return whether this name means the shipped head: no file has its name."""
        return name == DEFAULT_HEAD and not _card_path(name).exists()

    def save(self, folder: str | Path) -> Path:
        """Write NAME.json and NAME.safetensors, replace older files, and return NAME.json's path.

        Raises:
            HeadError: if the files cannot be written, or would be too large to be read again.
        """
        path, self.card = write_head(Path(folder), self.card, self.tensors)
        return path

    def check_target(self, target: Manifest) -> None:
        """Raise `PairMismatchError` unless the head was trained for this target's weights.

        Weights in another precision are accepted with a warning, since their states differ little.
        """
        expected = self.card.target
        if (expected.origin, expected.hidden) != (target.origin, target.dimensions.hidden):
            raise PairMismatchError(
                f"The decision head {self.card.name} was made for the target {expected.model} "
                f"(weights {expected.origin}, hidden states of {expected.hidden}), not for "
                f"{target.model} (weights {target.origin}, hidden states of "
                f"{target.dimensions.hidden}): give the edge a head that was trained for its "
                "target, or no head."
            )
        if expected.precision != target.precision and not self._warned:
            self._warned = True
            _log.warning(
                "the decision head %s was trained on %s states of %s, but it will judge %s states",
                self.card.name, expected.precision, expected.model, target.precision,
            )  # fmt: skip

    def supports(self, drafter_origin: str, hidden_size: int) -> bool:
        """Return whether the head was trained for a drafter of these weights and hidden size."""
        expected = self.card.drafter
        return (expected.origin, expected.hidden) == (drafter_origin, hidden_size)

    def logits(
        self,
        drafter: NDArray[np.floating],
        target: NDArray[np.floating],
        tokens: NDArray[np.integer],
        channel: Channel,
    ) -> NDArray[np.float32]:
        """Compute the logits z [m] of wisv (25); NaN where the states overflow.

        drafter: hidden states [m, d_D]. target: hidden states [m, d_T]. tokens: ids of the draft
        token and of the target's token, [m, 2]. A head reads either the states or the ids, and
        ignores the other argument. Raises ValueError if the argument that it reads has another
        shape.
        """
        return self._score(drafter, target, tokens, offset=self._offset(channel))

    def judge(self, channel: Channel, threshold: float | None = None) -> HeadJudge:
        """Bind the head to a link and a threshold of ρ; None: the recommended threshold.

        Threshold 0 rejects every mismatch, threshold 1 rejects none. Raises ValueError for a
        threshold outside [0, 1].
        """
        wanted = self.card.threshold if threshold is None else threshold
        return HeadJudge(
            width=self.card.drafter.hidden,
            form=self.card.hidden,
            bound=_logit(wanted),
            score=self._bind(channel),
            bind=self._bind,
        )

    def _bind(self, channel: Channel) -> Score:
        """Return the function from mismatches to logits on this link."""
        return partial(self._score, offset=self._offset(channel))

    def _fold(self) -> None:
        """Fold the (affine) standardisation into w1 and b1; split w1 into states and link."""
        w1, b1 = (self.tensors[name].astype(np.float64) for name in ("w1", "b1"))
        states = w1.shape[1] - self.card.link_width
        self._link = w1[:, states:]  # [h, 4] or [h, 0]
        per_state = w1[:, :states]
        if self.card.features == "states":
            mean, std = (self.tensors[name].astype(np.float64) for name in ("mean", "std"))
            per_state = per_state / std
            b1 = b1 - per_state @ mean
        with np.errstate(over="ignore"):
            # [d_D + d_T, h], or [2·buckets, h]
            self._inputs = np.ascontiguousarray(per_state.T, np.float32)
            self._w2, self._b2 = (self.tensors[name].astype(np.float32) for name in ("w2", "b2"))
            self._b1 = b1
            finite = np.isfinite(self._inputs).all() and np.isfinite(b1.astype(np.float32)).all()
        if not finite:
            raise HeadError(
                f"The weights of the head {self.card.name} are not valid: they overflow when its "
                "input states are standardised, because a standard deviation is too small."
            )

    def _offset(self, channel: Channel) -> NDArray[np.float32]:
        """Compute the part of w1·u + b1 that is the same for all mismatches of a request, [h]."""
        if self.card.link is None:
            return self._b1.astype(np.float32)
        c = self.card.link.standardise(channel.features())
        with np.errstate(over="ignore"):
            return (self._b1 + self._link @ c).astype(np.float32)

    def _score(
        self,
        drafter: NDArray[np.floating],
        target: NDArray[np.floating],
        tokens: NDArray[np.integer],
        *,
        offset: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        with np.errstate(over="ignore", invalid="ignore"):
            # [m, h]
            inner = offset + (
                self._project_states(drafter, target, len(tokens))
                if self.card.features == "states"
                else self._project_tokens(tokens)
            )
            logits: NDArray[np.float32] = (
                np.multiply(np.maximum(inner, 0.0), self._w2).sum(axis=1) + self._b2
            )
        # mark overflows, since ReLU would convert −∞ to 0
        logits[~np.isfinite(inner).all(axis=1)] = np.nan
        return logits

    def _project_states(
        self, drafter: NDArray[np.floating], target: NDArray[np.floating], count: int
    ) -> NDArray[np.float32]:
        at = self.card.drafter.hidden
        shapes = ((count, at), (count, self.card.target.hidden))
        if (drafter.shape, target.shape) != shapes:
            raise ValueError(
                f"The head reads states of shapes {shapes[0]} and {shapes[1]}, not "
                f"{drafter.shape} and {target.shape}."
            )
        return _product(drafter, self._inputs[:at]) + _product(target, self._inputs[at:])

    def _project_tokens(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        if tokens.shape != (len(tokens), 2):
            raise ValueError(
                f"The head reads two token ids per mismatch, not an array of shape {tokens.shape}."
            )
        buckets = len(self._inputs) // 2
        # [m, 2]
        columns = token_buckets(tokens, buckets)
        # [m, h]
        summed: NDArray[np.float32] = self._inputs[columns[:, 0]]
        summed += self._inputs[buckets + columns[:, 1]]
        return summed


def _product(states: NDArray[np.floating], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply states [m, d] · weights [d, h], in pieces that BLAS computes in one thread.

    On busy cores the threads of BLAS wait for each other: a product then takes 128 ms instead of
    70 µs. If there are many more rows than in a round, pieces would be too small, so the whole
    product is computed at once.
    """
    single: NDArray[np.float32] = states.astype(np.float32, copy=False)
    piece = _SINGLE_THREAD // max(1, len(single) * weights.shape[1])
    if piece < 8:
        return single @ weights
    product = single[:, :piece] @ weights[:piece]
    for start in range(piece, len(weights), piece):
        end = start + piece
        product += single[:, start:end] @ weights[start:end]
    return product


def _card_path(name: str) -> Path:
    return Path(name if name.endswith(".json") else f"{name}.json")


def _logit(threshold: float) -> float:
    """Compute log(threshold / (1 − threshold)), the bound of z in (27); −∞ at 0 and ∞ at 1."""
    if not 0.0 <= threshold <= 1.0:  # also true for NaN
        raise ValueError(f"A threshold must be between 0 and 1, not {threshold}.")
    if threshold in (0.0, 1.0):
        return math.copysign(math.inf, threshold - 0.5)
    return math.log(threshold) - math.log1p(-threshold)
