"""The target as a weighted ensemble of workers (specfed §II-§III; DESIGN §6.6).

In:  flights, which every worker makes by itself, with its own model on its own machine.
Out: logits: of Σ w_m p̃_m at every position of each window and at the bonus position, rebuilt from
     the top K that each worker has told.

Words: a worker is *late* when it has not answered within ``late_s``, and *gone* when it is not
attached. What becomes of a flight then is the federation's policy: ``wait`` for it, up to
``give_up_s``; ``drop`` it from this flight, the other weights renormalised; or ``fail`` the flight.
A worker whose answer makes no sense is treated as gone until it has been attached anew. All of it
is counted; what a worker has missed it is fed with its next step.

The ensemble has no hidden states. Its logits are meant for the temperature that was asked for
(`speculation.ensemble`); top-k and top-p act on the average.
"""

import hashlib
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import zmq

from edge_runtime.config import MEBIBYTE, EdgeLimits
from edge_runtime.targets.holding import Holding, parents_of
from edge_runtime.targets.listed import Federation, lacks_room, places, read_list
from edge_runtime.targets.peer import Peer, Place, expect_locked
from edge_runtime.targets.target import Ask, Landing, Opening, Target, wait_for_nodes
from engines.decoder import Output
from speculation.ensemble import TopRows, aggregate, as_logits
from wire.codecs.topk import decode_topk
from wire.errors import ConfigError, MalformedError, TargetLostError
from wire.messages import Buffer
from wire.nodes import Attach, Ready, Scored, Step

_DEPTH = 2  # one flight with the workers, and one on its way to them
_BEHIND = 2 * _DEPTH  # steps that a worker has not answered: it is sent no more
_ROUNDING = 1.0 - 1e-3  # of a row's mass
_TRIED = 32  # rows of a pass whose time the start measures
_TOKEN_BYTES = 16  # of one of the top K in an answer, at most; and of a row besides


@dataclass(eq=False)
class _Member:
    """One worker of the ensemble. digest: of what it must hold, once that is known."""

    peer: Peer
    weight: float
    digest: str
    holding: Holding
    incarnation: bytes | None = None  # as which it was attached when last looked at
    sent: dict[int, float] = field(default_factory=dict)  # flights it has not answered, since when


@dataclass(eq=False)
class _Flight:
    """A flight under way. missing: the members that it waits for; answers: those of the others."""

    asks: Sequence[Ask]
    started_s: float
    missing: set[int]
    answers: dict[int, TopRows] = field(default_factory=dict)
    late: bool = False  # has that been counted?

    @property
    def rows(self) -> int:
        """Wanted of each member."""
        return sum(ask.rows for ask in self.asks)


class FederatedTarget(Target):
    """Workers with their weights, and one policy for all."""

    states = False
    depth = _DEPTH

    def __init__(self, federation: Federation, spots: Sequence[Place], opening: Opening) -> None:
        config = opening.config
        self._federation = federation
        self._manifest = opening.artifact.manifest
        self._slots = config.limits.sessions
        self._tally = opening.tally
        self._flights: dict[int, _Flight] = {}
        self._landed: list[Landing] = []
        self._opened = False
        self.context = min(config.limits.context, self._manifest.dimensions.context)
        self.digest = ""
        most = _answer_bytes(config.limits, federation.kept)
        self._members = [
            _Member(
                Peer(
                    spot,
                    opening.keys,
                    most,
                    expect=partial(self._unfit, index),
                    happened=partial(self._note, index),
                ),
                listed.weight,
                listed.digest,
                Holding(self._slots),
            )
            for index, (listed, spot) in enumerate(zip(federation.worker, spots, strict=True))
        ]

    def settle_in(self) -> None:
        """All that can be known of the workers is; from now on it must stay so."""
        self._opened = True
        held = [member.peer.ready for member in self._members]
        self.context = min([self.context, *(ready.context for ready in held if ready)])
        told = [(member.digest, member.weight) for member in self._members]
        of = self._federation
        what = repr((told, of.kept, of.values, of.reconstruction))
        self.digest = hashlib.sha256(what.encode()).hexdigest()[:16]

    @property
    def attached(self) -> int:
        """Workers that can take part."""
        return sum(member.incarnation is not None for member in self._members)

    # A target's

    def start(self, number: int, asks: Sequence[Ask]) -> None:
        """Send the flight to every worker that can take part."""
        everyone = set(range(len(self._members)))
        flight = self._flights[number] = _Flight(asks, time.monotonic(), set(everyone))
        for index in everyone:
            if self._able(self._members[index]):
                self._send(index, number, flight)
                continue
            for ask in asks:
                self._members[index].holding.pass_over(ask)

    def keep(self, slot: int, path: Sequence[int]) -> None:
        """Every worker that was in the slot's last flight is told with its next step."""
        for member in self._members:
            member.holding.keep(slot, path)

    def landed(self) -> Sequence[Landing]:
        """Hear the workers, see who is late, and land what is complete."""
        for index, member in enumerate(self._members):
            for scored, frames in member.peer.hear():
                self._take(index, scored, frames)
            self._tally.node_bytes_in[member.peer.place.name] = member.peer.received_bytes
            self._look_after(index)
        for number, flight in list(self._flights.items()):
            if flight.missing:
                self._hurry(number, flight)
            if not flight.missing and number in self._flights:
                self._land(number, flight)
        landed, self._landed = self._landed, []
        return landed

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """The workers' connections."""
        return [source for member in self._members for source in member.peer.sources]

    @property
    def due_s(self) -> float | None:
        """Until somebody is late, or is to be asked again."""
        now_s = time.monotonic()
        dues = [member.peer.due_s for member in self._members]
        for flight in self._flights.values():
            patience_s = self._federation.give_up_s if flight.late else self._federation.late_s
            dues.append(max(0.0, flight.started_s + patience_s - now_s))
        return min((due for due in dues if due is not None), default=None)

    @property
    def trouble(self) -> str:
        """Which workers cannot take part, or are late, and why."""
        found = []
        for member in self._members:
            late = self._waited_s(member) > self._federation.late_s
            found.append(member.peer.trouble or (f"{member.peer.place.name}: late" if late else ""))
        return ", ".join(filter(None, found))

    @property
    def nodes(self) -> Mapping[str, bool]:
        """The workers."""
        members = self._members
        return {member.peer.place.name: member.peer.incarnation is not None for member in members}

    def close(self) -> None:
        """Close the connections."""
        for member in self._members:
            member.peer.close()

    # Each worker

    def _able(self, member: _Member) -> bool:
        """Whether a worker can be sent a step now."""
        if member.incarnation is None or len(member.sent) >= _BEHIND:
            return False
        return self._federation.late != "drop" or self._waited_s(member) <= self._federation.late_s

    @staticmethod
    def _waited_s(member: _Member) -> float:
        """How long a worker has owed the oldest answer that it owes."""
        return time.monotonic() - min(member.sent.values(), default=math.inf)

    def _send(self, index: int, number: int, flight: _Flight) -> None:
        member = self._members[index]
        assert member.incarnation is not None
        items, tokens = zip(*map(member.holding.item, flight.asks), strict=True)
        step = Step(incarnation=member.incarnation, number=number, items=list(items))
        frames = (np.concatenate(tokens).astype("<u4").tobytes(), parents_of(flight.asks))
        member.sent[number] = time.monotonic()
        self._tally.node_bytes_out[member.peer.place.name] += member.peer.send(step, frames)

    def _take(self, index: int, scored: Scored, frames: Sequence[Buffer]) -> None:
        """A worker's answer; one that makes no sense ends its attachment."""
        member = self._members[index]
        if scored.incarnation != member.peer.incarnation:
            return  # it came behind nonsense
        flight = self._flights.get(scored.number)
        try:
            if scored.number != next(iter(member.sent), None):
                raise MalformedError(f"It is to step {scored.number}, whose turn it is not.")
            del member.sent[scored.number]
            if flight is None:
                return  # it comes too late
            if len(frames) != 1:
                raise MalformedError(f"An answer has 1 frame, not {len(frames)}.")
            rows = self._rows(frames[0], flight.rows)
        except MalformedError as error:
            self._note(index, "lied")
            member.peer.leave(f"its answer makes no sense: {error}")
            return
        member.peer.proved()
        self._tally.node_compute_s[member.peer.place.name] += sum(scored.compute_ns) * 1e-9
        if index in flight.missing:
            flight.missing.discard(index)
            flight.answers[index] = rows

    def _rows(self, frame: Buffer, count: int) -> TopRows:
        """What a frame says of ``count`` rows; `MalformedError` if no model can have said it."""
        kept, vocab = self._federation.kept, self._manifest.vocab_size
        rows = decode_topk(frame, count, kept, vocab)
        # the K most probable of V tokens have at least K/V together
        if count and rows.retained.min() < _ROUNDING * rows.kept / vocab:
            raise MalformedError("A row has less mass than its most probable tokens can have.")
        return rows

    def _look_after(self, index: int) -> None:
        """Attach a worker that is here; send one that is attached what it has not been sent."""
        member = self._members[index]
        if member.incarnation != member.peer.incarnation:
            member.incarnation = member.peer.incarnation
            member.holding.lose()
            member.sent.clear()
        if (ready := member.peer.unattached) is not None:
            member.digest = member.digest or ready.digest
            of = self._federation
            member.peer.attach(
                Attach(incarnation=secrets.token_bytes(16), kept=of.kept, values=of.values)
            )
        for number, flight in self._flights.items():
            if index in flight.missing and number not in member.sent and self._able(member):
                self._send(index, number, flight)

    def _unfit(self, index: int, ready: Ready) -> str:
        """What is wrong with what a worker holds."""
        wanted = self._members[index].digest
        if ready.stages:
            return "it holds one stage of a model: a federation wants whole models"
        known = (self._manifest.tokenizer_fingerprint, self._manifest.vocab_size)
        if (ready.tokenizer, ready.vocab_size) != known:
            return (
                f"the vocabulary of {ready.model} ({ready.vocab_size} tokens) is not that of "
                f"{self._manifest.model} ({known[1]} tokens): an ensemble needs one vocabulary"
            )
        if wanted and ready.digest != wanted:
            return (
                f"it holds {ready.model} with digest {ready.digest}, not {wanted}: if that is "
                "meant, change the list of workers or start this edge again"
            )
        return lacks_room(ready, self._slots, self.context if self._opened else 0)

    def _note(self, index: int, what: str) -> None:
        self._tally.nodes[self._members[index].peer.place.name, what] += 1

    # Each flight

    def _hurry(self, number: int, flight: _Flight) -> None:
        """Do as the policy says with a flight that still waits for somebody."""
        age_s, of = time.monotonic() - flight.started_s, self._federation
        if age_s > of.late_s and not flight.late:
            flight.late = True
            for index in flight.missing:
                self._note(index, "late")
        if of.late == "drop" and flight.answers:
            for index in list(flight.missing):
                if flight.late or number not in self._members[index].sent:
                    flight.missing.discard(index)
                    self._note(index, "dropped")
        elif age_s > of.give_up_s or (of.late == "fail" and flight.late):
            del self._flights[number]
            names = ", ".join(self._members[index].peer.place.name for index in flight.missing)
            error = TargetLostError(
                f"Of this edge's federation {names} did not answer within {age_s:.1f} s."
            )
            self._landed.append(Landing(number, error=error))

    def _land(self, number: int, flight: _Flight) -> None:
        del self._flights[number]
        present = sorted(flight.answers)
        answers = []
        if flight.rows:
            # [Σ rows, V]
            p = aggregate(
                [self._members[index].weight for index in present],
                [flight.answers[index] for index in present],
                self._manifest.vocab_size,
                self._federation.reconstruction,
            )
        end = 0
        for ask in flight.asks:
            begin, end = end, end + ask.rows
            logits = as_logits(p[begin:end], ask.temperature) if ask.rows else _NOTHING
            answers.append(Output(logits, _NOTHING))
        self._landed.append(Landing(number, answers))


_NOTHING = np.empty((0, 0), np.float32)


def _answer_bytes(limits: EdgeLimits, kept: int) -> int:
    """What an answer has at most: to a window of every session, or to what the start measures."""
    rows = max(limits.sessions * (limits.window + 1), _TRIED)
    return MEBIBYTE + rows * (kept + 1) * _TOKEN_BYTES


def open_target(opening: Opening) -> FederatedTarget:
    """The federation that the list names, when all its workers are attached.

    Under ``drop`` it begins without those that do not come within ``give_up_s``, if one does.
    """
    path = opening.config.nodes
    if path is None:
        raise ConfigError("A federation needs a list of its workers (--federate FILE).")
    federation = read_list(path, Federation)
    spots = places(path, federation.worker)
    expect_locked(path, spots, opening.keys)
    target = FederatedTarget(federation, spots, opening)
    try:
        wait_for_nodes(
            target,
            lambda: target.attached == len(spots),
            opening.meanwhile,
            federation.give_up_s if federation.late == "drop" else None,
        )
        if not target.attached:
            raise TargetLostError(f"No worker of this federation can be used: {target.trouble}.")
    except BaseException:
        target.close()
        raise
    target.settle_in()
    return target
