"""Training instances (wisv §V-B, "Training instances"): mismatches under sampled channels.

In:  mined episodes. Out: `Instances`: the mismatches' states as the edge will see them, K channels
     a question, and for each mismatch under each channel whether to reject it: its label, relaxed
     where the channel is poor.

What is drawn for a question depends on its name and the seed, not on the questions beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.judge.episodes import Episode, Mined
from pilotfish.judge.reading import Floats, Ids
from pilotfish.speculation.channel import GOOD_BPS, GOOD_RTT_S, POOR_BPS, POOR_RTT_S, Channel
from pilotfish.speculation.relabelling import (
    FLOOR,
    KAPPA,
    TEMPERATURE,
    relabel,
    repair_probabilities,
)
from pilotfish.wire.codecs.hidden import HiddenFormat, decode_hidden, encode_hidden
from pilotfish.wire.errors import UnsupportedError

# what is sampled: log-uniform, but for the loss, which is uniform
BPS = (2e6, 1e9)
RTT_S = (2e-3, 200e-3)
LOSS = (0.0, 0.1)

# of quality 1, where every label stays, and of quality 0
GOOD = Channel(rtt_s=GOOD_RTT_S, up_bps=GOOD_BPS, down_bps=GOOD_BPS, loss=0.0)
POOR = Channel(rtt_s=POOR_RTT_S, up_bps=POOR_BPS, down_bps=POOR_BPS, loss=0.0)

_MOST_SEED = 2**63 - 1


class Relabelling(NamedTuple):
    """The parameters of `speculation.relabelling`."""

    kappa: float = KAPPA
    floor: float = FLOOR
    temperature: float = TEMPERATURE


@dataclass(frozen=True)
class InstanceOptions:
    """How instances are made.

    channels: K, of each question. form: how the drafter's states are sent. relabelling: None keeps
    the labels as they were mined, whatever the channel.
    """

    channels: int = 8
    seed: int = 0
    form: HiddenFormat = "int8"
    relabelling: Relabelling | None = field(default_factory=Relabelling)


@dataclass(frozen=True, eq=False)
class Instances:
    """n mismatches of q questions, each under the K channels of its question.

    drafter [n, d_D], target [n, d_T]: f32, the states at the drafted token, the drafter's as they
    arrive. tokens: i64 [n, 2], drafted and wanted. at: i64 [n], positions. critical: bool [n], the
    labels y. stalling: bool [n], see `Episode`. question: i64 [n], indices of ``keys`` [q].
    channels: [q][K]. rejected: bool [n, K], the labels under each channel. An instance is one
    (mismatch, channel): states are held once.
    """

    keys: Sequence[str]
    question: Ids
    drafter: Floats
    target: Floats
    tokens: Ids
    at: Ids
    critical: NDArray[np.bool_]
    stalling: NDArray[np.bool_]
    channels: Sequence[Sequence[Channel]]
    rejected: NDArray[np.bool_]

    def __len__(self) -> int:
        """How many mismatches there are; K times as many instances."""
        return len(self.question)

    @property
    def harmful(self) -> NDArray[np.bool_]:
        """What should be rejected under a good channel, bool [n]."""
        return self.critical | self.stalling

    @property
    def links(self) -> NDArray[np.float64]:
        """The features of the channels, f64 [q, K, 4]."""
        return np.array([[one.features() for one in some] for some in self.channels])

    @property
    def qualities(self) -> NDArray[np.float64]:
        """The quality of the channels, f64 [q, K]."""
        return np.array([[one.quality() for one in some] for some in self.channels])

    def of(self, keys: Collection[str]) -> Instances:
        """Those of these questions alone."""
        chosen = [index for index, key in enumerate(self.keys) if key in keys]
        kept = np.isin(self.question, chosen)
        return Instances(
            keys=[self.keys[index] for index in chosen],
            question=np.searchsorted(np.array(chosen, np.int64), self.question[kept]),
            drafter=self.drafter[kept],
            target=self.target[kept],
            tokens=self.tokens[kept],
            at=self.at[kept],
            critical=self.critical[kept],
            stalling=self.stalling[kept],
            channels=[self.channels[index] for index in chosen],
            rejected=self.rejected[kept],
        )


def instances(mined: Mined, episodes: Iterable[Episode], sampling: InstanceOptions) -> Instances:
    """The instances of all mismatches of these episodes; those that have none are left out.

    Raises `UnsupportedError` if there is no mismatch at all, or for states of another width than
    ``mined`` tells.
    """
    found = [one for one in episodes if len(one)]
    if not found:
        raise UnsupportedError("There is no mismatch to learn from: mine more questions.")
    widths = mined.drafter["hidden"], mined.target["hidden"]
    for one in found:
        if (one.drafter.shape[1], one.target.shape[1]) != widths:
            raise UnsupportedError(
                f"The states of {one.key} are {one.drafter.shape[1]} and {one.target.shape[1]} "
                f"wide, not {widths[0]} and {widths[1]}: it is of another pair. Remove it."
            )
    stalling = np.concatenate([one.stalling for one in found])
    channels = [sampled(sampling.channels, sampling.seed, one.key) for one in found]
    return Instances(
        keys=[one.key for one in found],
        question=np.repeat(np.arange(len(found)), [len(one) for one in found]),
        drafter=as_sent(np.concatenate([one.drafter for one in found]), sampling.form),
        target=np.concatenate([one.target for one in found]),
        tokens=np.concatenate([one.tokens for one in found]),
        at=np.concatenate([one.at for one in found]),
        critical=np.concatenate([one.critical for one in found]),
        stalling=stalling,
        channels=channels,
        # no channel makes it worth while to gain nothing
        rejected=stalling[:, None]
        | np.concatenate(
            [_relabelled(one, some, sampling) for one, some in zip(found, channels, strict=True)]
        ),
    )


def as_sent(states: Floats, form: HiddenFormat) -> Floats:
    """The states [n, d] as the edge decodes them."""
    count, width = states.shape
    return decode_hidden(encode_hidden(states, form), count, width, form)


def sampled(count: int, seed: int, key: str) -> list[Channel]:
    """The channels of the question ``key``, spread evenly: each feature is once in each K-th.

    So that no question has the better channels, and no head learns by them which question it is.
    """
    # [K, 4] each, in [0, 1)
    order, within = _uniforms(8 * count, seed, "channel", key).reshape(2, count, 4)
    draws = (order.argsort(axis=0) + within) / count
    return [
        Channel(
            up_bps=_log_uniform(up, *BPS),
            down_bps=_log_uniform(down, *BPS),
            rtt_s=_log_uniform(rtt, *RTT_S),
            loss=LOSS[0] + (LOSS[1] - LOSS[0]) * loss,
        )
        for up, down, rtt, loss in draws.tolist()
    ]


def split(keys: Sequence[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """The questions to train with, and about this share of them that is kept out.

    Raises `UnsupportedError` for less than two questions; there is one at least on each side.
    """
    if len(keys) < 2:
        raise UnsupportedError(
            "Some questions are kept out of training, so it takes two with mismatches at least."
        )
    order = sorted(keys, key=lambda key: float(_uniforms(1, seed, "split", key)[0]))
    count = min(max(round(share * len(order)), 1), len(order) - 1)
    return sorted(order[count:]), sorted(order[:count])


class Kept(NamedTuple):
    """How many labels y = 1 stay 1 under channels whose quality lies within low and high.

    channels: how many were sampled there. critical: their labels of 1. kept: how many stay.
    """

    low: float
    high: float
    channels: int
    critical: int
    kept: int


def kept_by_quality(given: Instances, parts: int = 5) -> list[Kept]:
    """What relabelling did, for ``parts`` equal ranges of quality from poor to good."""
    # [q, K] and [n, K]
    part = np.minimum((given.qualities * parts).astype(np.int64), parts - 1)
    of_mismatch = part[given.question]
    critical = np.broadcast_to(given.critical[:, None], of_mismatch.shape)
    return [
        Kept(
            low=index / parts,
            high=(index + 1) / parts,
            channels=int((part == index).sum()),
            critical=int((critical & (of_mismatch == index)).sum()),
            kept=int((critical & given.rejected & (of_mismatch == index)).sum()),
        )
        for index in range(parts)
    ]


def expected_share(given: Instances, channel: Channel, relabelling: Relabelling | None) -> float:
    """Σπ / Σy over all questions under this channel: the share of labels of 1 that stay."""
    if relabelling is None or not given.critical.any():
        return 1.0
    total = 0.0
    for index in range(len(given.keys)):
        own = given.question == index
        total += repair_probabilities(
            given.critical[own], given.at[own], channel.quality(), **relabelling._asdict()
        ).sum()
    return float(total / given.critical.sum())


def _relabelled(
    episode: Episode, channels: Sequence[Channel], sampling: InstanceOptions
) -> NDArray[np.bool_]:
    """The labels under each channel, bool [n, K]."""
    if sampling.relabelling is None:
        return np.repeat(episode.critical[:, None], len(channels), axis=1)
    # Draws of its own for each channel: with the same ones for all, a label would be relaxed
    # under most of them or none, and the head would learn that by heart.
    draws = _uniforms(len(channels) * len(episode), sampling.seed, "label", episode.key)
    return np.stack(
        [
            relabel(
                episode.critical,
                episode.at,
                channel.quality(),
                uniforms,
                **sampling.relabelling._asdict(),
            )
            for channel, uniforms in zip(channels, draws.reshape(len(channels), -1), strict=True)
        ],
        axis=1,
    )


def _uniforms(count: int, seed: int, purpose: str, key: str) -> NDArray[np.float64]:
    """Draws in [0, 1), f64 [count], a function of what they are for."""
    if not 0 <= seed <= _MOST_SEED:
        raise UnsupportedError(f"A seed is a number from 0 to {_MOST_SEED}, not {seed}.")
    named = sha256(f"{seed} {purpose} {key}".encode()).digest()
    words = np.random.Philox(key=np.frombuffer(named, "<u8", 2)).random_raw(count)
    drawn: NDArray[np.float64] = (words >> np.uint64(11)) * 2.0**-53
    return drawn


def _log_uniform(draw: float, low: float, high: float) -> float:
    return float(low * (high / low) ** draw)
