"""Replay recorded rounds over a different link, or with different pass times, by the cost model.

In: measured rounds, a link, and pass times that replace the recorded ones. Out: modelled (not
measured) seconds.

Each round keeps its drafts, accepted tokens and bytes. Its time is T = draft + encode + T_comm +
queue + verify + settle (`speculation.latency`). T_comm is computed from the round's bytes and
exchanges and from the link. Bytes are the sizes of the frames that are handed to ZeroMQ, without
the overhead of encryption and TCP.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from pilotfish.base.errors import RunFileError, UnsupportedError
from pilotfish.device_runtime.record import Round
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.axes import applied_to
from pilotfish.lab.field.configuration import Configuration
from pilotfish.lab.field.report.figures import order
from pilotfish.lab.field.token_speed import committed_tokens, steady_rounds, steady_token_s
from pilotfish.speculation.latency import Link, communication_s, transfer_s
from pilotfish.wire.protocols import LOCAL, PROTOCOL_REGISTRY, STREAM, lossless, streams
from pilotfish.wire.request import AUTO


def replay_token_s(
    rounds: Sequence[Round],
    link: Link,
    draft_s: float | None = None,
    verify_s: float | None = None,
) -> float:
    """Compute the seconds per committed token of one answer's rounds over ``link``.

    draft_s: seconds of a drafter's pass, which drafts one token of a chain or one level of a tree.
    verify_s: seconds of a target's pass. For None, the recorded times are used. Under `stream` a
    token takes verify_s (or the recorded mean without the link) or the time of its bytes, whichever
    is longer; the single RTT of an answer belongs to its first round (`field.token_speed`).
    """
    tokens = committed_tokens(rounds)
    if tokens == 0:
        raise UnsupportedError("These rounds committed no token, so there is nothing to replay.")
    if all(round_.protocol == STREAM for round_ in rounds):
        down_bytes = sum(round_.downlink_bytes for round_ in rounds)
        if verify_s is None:
            verify_s = sum(r.timings.total - _link_s(r) for r in rounds) / tokens
        return max(verify_s, transfer_s(down_bytes / tokens, link.down_bps))
    return sum(round_s(round_, link, draft_s, verify_s) for round_ in rounds) / tokens


def round_s(
    round_: Round, link: Link, draft_s: float | None = None, verify_s: float | None = None
) -> float:
    """Compute the seconds of one round over ``link``; its protocol must not be `stream`."""
    timings = round_.timings
    draft = timings.draft if draft_s is None else draft_s * _passes(round_)
    if round_.protocol == LOCAL:
        return draft + timings.settle
    verify = timings.verify if verify_s is None else verify_s
    compute = draft + timings.encode + timings.queue + verify + timings.settle
    sizes = round_.uplink_bytes, round_.downlink_bytes
    return compute + communication_s(*sizes, link, round_.exchanges)


def _passes(round_: Round) -> int:
    """Return the number of the drafter's passes in a round.

    Each level of drafts takes one pass; a token of `local` takes one pass. A protocol that sends
    the last token's state with the window (`wisv-full`) takes one more.
    """
    if round_.protocol == LOCAL:
        return 1
    exchange = PROTOCOL_REGISTRY.get(round_.protocol)
    last = exchange is not None and exchange.reads_last_token and round_.window > 0
    return round_.window + last


def _link_s(round_: Round) -> float:
    return round_.timings.uplink + round_.timings.downlink


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The seconds per committed token of one (protocol, window), as medians over n answers.

    modelled_s: modelled seconds for each link, [links].
    """

    configuration: Configuration
    n: int
    measured_s: float
    modelled_s: list[float]


def replay(
    answers: Iterable[Answer],
    links: Sequence[Link],
    draft_s: float | None = None,
    verify_s: float | None = None,
) -> list[Replay]:
    """Replay the steady rounds of each (protocol, window) of a run over each link.

    An answer under ``auto`` counts for the configuration that ``auto`` chose, since on another link
    it might choose differently. Answers under `ahead` (`replayable`) and answers with one round are
    skipped. Raises `RunFileError` if no answer remains.
    """
    groups: dict[Configuration, list[Answer]] = {}
    for answer in filter(replayable, answers):
        if steady_token_s(answer) is not None:
            groups.setdefault(_configuration_used(answer), []).append(answer)
    if not groups:
        raise RunFileError(
            "The run has nothing to replay: it needs a finished answer of a protocol other "
            "than ahead, with rounds after the first round, which reads the prompt."
        )
    return [
        Replay(
            configuration=configuration,
            n=len(groups[configuration]),
            measured_s=median(steady_token_s(a) or 0.0 for a in groups[configuration]),
            modelled_s=[
                median(
                    replay_token_s(steady_rounds(a), link, draft_s, verify_s)
                    for a in groups[configuration]
                )
                for link in links
            ],
        )
        for configuration in sorted(groups, key=order)
    ]


def replayable(answer: Answer) -> bool:
    """Return whether a different link would change only the time of an answer's rounds.

    Under `ahead` it would also change their content, because the link determines which drafts
    arrive in time for a pass. So `ahead` must be measured, not replayed.
    """
    protocol = _configuration_used(answer).protocol
    return protocol == STREAM or not streams(protocol)


def fastest(replays: Sequence[Replay], link: int) -> Replay:
    """Return the fastest replay over a link; skip lossy protocols, unless all are lossy.

    link: index of the link.
    """
    lossless_replays = [
        candidate for candidate in replays if lossless(candidate.configuration.protocol)
    ]
    return min(lossless_replays or replays, key=lambda candidate: candidate.modelled_s[link])


def _configuration_used(answer: Answer) -> Configuration:
    if answer.protocol != AUTO or answer.choice is None:
        return answer.configuration
    chosen = answer.choice.protocol
    return Configuration.of(chosen, answer.choice.window, applied_to(chosen, answer.point))
