"""Make training instances (WISV §V-B, "Training instances"): mismatches under sampled channels.

In:  mined episodes. Out: `Instances`: the states of each mismatch, as the edge will decode them;
     K channels for each question; and a label for each mismatch under each channel: 1 rejects the
     mismatch, 0 forgives it. Under a poor channel, more labels are 0.

A question's random draws depend only on its key and the seed, not on the other questions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.settings import setting
from pilotfish.lab.judge.episodes import Episode, MiningRecord, episodes
from pilotfish.lab.judge.model_passes import Floats, Ids
from pilotfish.speculation.channel import GOOD_BPS, GOOD_RTT_S, POOR_BPS, POOR_RTT_S, Channel
from pilotfish.speculation.relabelling import (
    FLOOR,
    KAPPA,
    TEMPERATURE,
    relabel,
    repair_probabilities,
)
from pilotfish.wire.codecs.hidden import HiddenFormat, decode_hidden, encode_hidden

# Ranges of the sampled channels. Rates (bit/s) and RTTs (s) are log-uniform, loss (share) uniform.
BPS = (2e6, 1e9)
RTT_S = (2e-3, 200e-3)
LOSS = (0.0, 0.1)

# GOOD has quality 1: no label changes under it. POOR has quality 0: the most labels change.
GOOD = Channel(rtt_s=GOOD_RTT_S, up_bps=GOOD_BPS, down_bps=GOOD_BPS, loss=0.0)
POOR = Channel(rtt_s=POOR_RTT_S, up_bps=POOR_BPS, down_bps=POOR_BPS, loss=0.0)

_MOST_SEED = 2**63 - 1


class Relabelling(Struct, frozen=True, array_like=True):
    """The parameters with which `speculation.relabelling` changes labels under a channel."""

    kappa: Annotated[
        float,
        setting(
            "distance over which a critical mismatch adds importance to others",
            gt=0,
            metavar="TOKENS",
        ),
    ] = KAPPA
    floor: Annotated[
        float,
        setting(
            "share of critical labels that stay under the poorest channel",
            ge=0,
            le=1,
            metavar="SHARE",
        ),
    ] = FLOOR
    temperature: Annotated[
        float,
        setting(
            "low: change only the least important labels; high: change labels at random",
            gt=0,
            flag="relax-temperature",
            metavar="T",
        ),
    ] = TEMPERATURE


class InstanceOptions(Struct, frozen=True):
    """The options of making instances.

    relabelling: None leaves the mined labels unchanged under every channel.
    """

    channels: Annotated[
        int, setting("number of channels sampled for each question", ge=1, le=1000, metavar="K")
    ] = 8
    seed: Annotated[int, setting("seed of all draws", ge=0)] = 0
    form: Annotated[
        HiddenFormat, setting("format in which the drafter's states will be sent", flag="hidden")
    ] = "int8"
    relabelling: Relabelling | None = Relabelling()


class MinedSettings(Struct, frozen=True, kw_only=True):
    """Options that ``pilotfish judge relabel`` and ``train`` share."""

    mined: Annotated[
        Path, setting("folder that judge mine has written", metavar="MINED", positional=True)
    ]
    options: InstanceOptions = InstanceOptions()
    no_relabel: Annotated[bool, setting("ablation: keep the mined labels under every channel")] = (
        False
    )

    def read(self) -> tuple[MiningRecord, InstanceOptions, Instances]:
        """Read the mined episodes and make instances; raise the same errors as `instances`."""
        options = self.options
        if self.no_relabel:
            options = structs.replace(options, relabelling=None)
        mined = MiningRecord.read(self.mined)
        return mined, options, instances(mined, episodes(self.mined), options)


@dataclass(frozen=True, eq=False)
class Instances:
    """n mismatches of q questions, each mismatch under the K channels of its question.

    An instance is one pair of mismatch and channel. All instances of a mismatch share its states.

    keys: the questions' keys, [q]. question: index into ``keys``, i64 [n]. drafter, target: each
    model's states at the drafted token, f32 [n, d_D] and f32 [n, d_T]; the drafter's states have
    been encoded and decoded. tokens: the drafter's and the target's token, i64 [n, 2]. at: position
    in the answer, i64 [n]. critical: mined label y, bool [n]. stalling: see `Episode`, bool [n].
    channels: channels of each question, [q][K]. rejected: label under each channel, bool [n, K].
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
        """Return n, the number of mismatches; the number of instances is n·K."""
        return len(self.question)

    @property
    def harmful(self) -> NDArray[np.bool_]:
        """Whether each mismatch must be rejected under a good channel, bool [n]."""
        return self.critical | self.stalling

    @property
    def links(self) -> NDArray[np.float64]:
        """The features of all channels, f64 [q, K, 4]."""
        return np.array(
            [[channel.features() for channel in channels] for channels in self.channels]
        )

    @property
    def qualities(self) -> NDArray[np.float64]:
        """The quality of all channels, from 0 to 1, f64 [q, K]."""
        return np.array([[channel.quality() for channel in channels] for channels in self.channels])

    def subset(self, keys: Collection[str]) -> Instances:
        """Return the instances of the questions with these keys."""
        indices = [index for index, key in enumerate(self.keys) if key in keys]
        selected = np.isin(self.question, indices)
        rows = {
            name: array[selected]
            for name, array in vars(self).items()
            if isinstance(array, np.ndarray)
        }
        rows["question"] = np.searchsorted(np.array(indices, np.int64), rows["question"])
        return Instances(
            keys=[self.keys[index] for index in indices],
            channels=[self.channels[index] for index in indices],
            **rows,
        )


def instances(
    mined: MiningRecord, episodes: Iterable[Episode], sampling: InstanceOptions
) -> Instances:
    """Make the instances of all mismatches of these episodes; skip episodes without mismatches.

    Raises `UnsupportedError` if no episode has a mismatch, or if an episode's states do not have
    the widths that ``mined`` states.
    """
    usable = [episode for episode in episodes if len(episode)]
    if not usable:
        raise UnsupportedError("There is no mismatch to learn from: mine more questions.")
    widths = mined.drafter["hidden"], mined.target["hidden"]
    for episode in usable:
        if (episode.drafter.shape[1], episode.target.shape[1]) != widths:
            raise UnsupportedError(
                f"The states of {episode.key} have widths {episode.drafter.shape[1]} and "
                f"{episode.target.shape[1]}, not {widths[0]} and {widths[1]}: the episode belongs "
                f"to another pair. Remove its file."
            )
    channels = [
        sample_channels(sampling.channels, sampling.seed, episode.key) for episode in usable
    ]
    relabelled = map(partial(_relabel, sampling), usable, channels)
    rows = {
        name: np.concatenate([getattr(episode, name) for episode in usable])
        for name in ("drafter", "target", "tokens", "at", "critical", "stalling")
    }
    return Instances(
        keys=[episode.key for episode in usable],
        question=np.repeat(np.arange(len(usable)), [len(episode) for episode in usable]),
        channels=channels,
        # A stalling mismatch is always rejected: to forgive it saves no round on any channel.
        rejected=rows["stalling"][:, None] | np.concatenate([*relabelled]),
        **(rows | {"drafter": as_decoded(rows["drafter"], sampling.form)}),
    )


def as_decoded(states: Floats, form: HiddenFormat) -> Floats:
    """Return states f32 [n, d] with the rounding error that sending them in ``form`` causes."""
    count, width = states.shape
    return decode_hidden(encode_hidden(states, form), count, width, form)


def sample_channels(count: int, seed: int, key: str) -> list[Channel]:
    """Draw K = ``count`` channels for the question ``key`` (stratified sampling).

    Each feature's range is cut into K equal parts, and one value is drawn from each part. So every
    question has channels of all qualities, and a head cannot recognise a question by its channels.
    """
    # order, within: [K, 4] each, in [0, 1)
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
    """Split questions into training and validation; return the keys of each.

    share: share of validation questions, rounded to whole questions, at least one for each side.
    Raises `UnsupportedError` for fewer than two questions.
    """
    if len(keys) < 2:
        raise UnsupportedError(
            "Training needs at least two questions with mismatches: one question is held out for "
            "validation."
        )
    order = sorted(keys, key=lambda key: float(_uniforms(1, seed, "split", key)[0]))
    count = min(max(round(share * len(order)), 1), len(order) - 1)
    return sorted(order[count:]), sorted(order[:count])


class LabelCounts(NamedTuple):
    """Number of labels of 1 under the channels with a quality from ``low`` to ``high``.

    channels: number of sampled channels in this range. critical: labels of 1 before relabelling.
    kept: labels of 1 after relabelling.
    """

    low: float
    high: float
    channels: int
    critical: int
    kept: int


def labels_by_quality(instances: Instances, parts: int = 5) -> list[LabelCounts]:
    """Count labels of 1 before and after relabelling, in ``parts`` equal ranges of quality."""
    # part: index of a channel's range, [q, K]; part_of_mismatch: [n, K]
    part = np.minimum((instances.qualities * parts).astype(np.int64), parts - 1)
    part_of_mismatch = part[instances.question]
    critical = np.broadcast_to(instances.critical[:, None], part_of_mismatch.shape)
    return [
        LabelCounts(
            low=index / parts,
            high=(index + 1) / parts,
            channels=int((part == index).sum()),
            critical=int((critical & (part_of_mismatch == index)).sum()),
            kept=int((critical & instances.rejected & (part_of_mismatch == index)).sum()),
        )
        for index in range(parts)
    ]


def expected_share(
    instances: Instances, channel: Channel, relabelling: Relabelling | None
) -> float:
    """Compute the expected share of mined labels y = 1 that stay 1 under this channel: Σπ / Σy.

    π is the probability that relabelling keeps a label of 1.
    """
    if relabelling is None or not instances.critical.any():
        return 1.0
    parameters = structs.asdict(relabelling)
    total = sum(
        repair_probabilities(
            instances.critical[rows], instances.at[rows], channel.quality(), **parameters
        ).sum()
        for rows in (instances.question == index for index in range(len(instances.keys)))
    )
    return float(total / instances.critical.sum())


def _relabel(
    sampling: InstanceOptions, episode: Episode, channels: Sequence[Channel]
) -> NDArray[np.bool_]:
    """Compute an episode's labels under each channel, bool [n, K]."""
    if sampling.relabelling is None:
        return np.repeat(episode.critical[:, None], len(channels), axis=1)
    parameters = structs.asdict(sampling.relabelling)
    # Each channel has its own draws. If all channels shared them, a label would change under most
    # channels or under none, and the head would memorise the mismatch.
    uniform_rows = _uniforms(len(channels) * len(episode), sampling.seed, "label", episode.key)
    relaxed = [
        relabel(episode.critical, episode.at, channel.quality(), uniforms, **parameters)
        for channel, uniforms in zip(channels, uniform_rows.reshape(len(channels), -1), strict=True)
    ]
    return np.stack(relaxed, axis=1)


def _uniforms(count: int, seed: int, purpose: str, key: str) -> NDArray[np.float64]:
    """Draw ``count`` numbers from [0, 1), f64; seed, purpose and key determine them."""
    if not 0 <= seed <= _MOST_SEED:
        raise UnsupportedError(f"A seed must be between 0 and {_MOST_SEED}, not {seed}.")
    digest = sha256(f"{seed} {purpose} {key}".encode()).digest()
    words = np.random.Philox(key=np.frombuffer(digest, "<u8", 2)).random_raw(count)
    drawn: NDArray[np.float64] = (words >> np.uint64(11)) * 2.0**-53
    return drawn


def _log_uniform(draw: float, low: float, high: float) -> float:
    return float(low * (high / low) ** draw)
