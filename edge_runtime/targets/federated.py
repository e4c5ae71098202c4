"""The target as a weighted ensemble of workers (specfed §II-§III; DESIGN §6.6).

In:  flights, which every worker makes by itself, with its own model on its own machine.
Out: logits: of Σ w_m p̃_m at every position of each window and at the bonus position, rebuilt from
     the top K that each worker has told.

Words: a worker is *late* when it has not answered within ``late_s``, and *gone* when it is not
attached. What becomes of a flight then is the federation's policy: ``wait`` for it, up to
``give_up_s``; ``drop`` it from this flight, the other weights renormalised; or ``fail`` the flight.
A worker whose answer makes no sense is treated as gone until it has been attached anew. All of it
is counted. What a worker has missed it is fed with its next step; under ``drop``, if that is long,
by a step of its own, while the others go on.

The ensemble has no hidden states. Its logits are meant for the temperature that was asked for
(`speculation.ensemble`); top-k and top-p act on the average.
"""

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import zmq

from pilotfish.edge_runtime.targets.listed import Federation, places, read_list
from pilotfish.edge_runtime.targets.member import DEPTH, Member
from pilotfish.edge_runtime.targets.peer import Place, expect_locked
from pilotfish.edge_runtime.targets.target import Opening, Scores, Span, Target, wait_for_nodes
from pilotfish.engines.decoder import Output
from pilotfish.speculation.ensemble import TopRows, aggregate, as_logits
from pilotfish.wire.errors import ConfigError, TargetLostError, UnsupportedError
from pilotfish.wire.nodes import MAX_ITEMS

_log = logging.getLogger("pilotfish.edge")

_NOTHING = np.empty((0, 0), np.float32)


@dataclass(eq=False)
class _Flight:
    """A flight under way. missing: the members that it waits for; answers: those of the others."""

    spans: Sequence[Span]
    started_s: float
    missing: set[int]
    answers: dict[int, TopRows] = field(default_factory=dict)
    late: bool = False  # has that been counted?

    @property
    def rows(self) -> int:
        """Wanted of each member."""
        return sum(span.rows for span in self.spans)


class FederatedTarget(Target):
    """Workers with their weights, and one policy for all."""

    states = False
    depth = DEPTH

    def __init__(self, federation: Federation, spots: Sequence[Place], opening: Opening) -> None:
        manifest = opening.artifact.manifest
        self._federation = federation
        self._vocab = manifest.vocab_size
        self._flights: dict[int, _Flight] = {}
        self._landed: list[Scores] = []
        self.context = min(opening.config.limits.context, manifest.dimensions.context)
        self.digest = ""
        self._members: list[Member] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            for listed, spot in zip(federation.worker, spots, strict=True):
                self._members.append(Member(listed, spot, federation, opening))
            stack.pop_all()

    def settle_in(self) -> None:
        """All that can be known of the workers is; from now on it must stay so."""
        for member in self._members:
            if member.ready is not None and member.ready.context < self.context:
                _log.warning(
                    "%s has room for %d tokens a slot: so has this federation, instead of %d",
                    *(member.name, member.ready.context, self.context),
                )
                self.context = member.ready.context
        for member in self._members:
            member.context = self.context
        told = [(member.digest, member.weight) for member in self._members]
        of = self._federation
        what = repr((told, of.kept, of.values, of.reconstruction))
        self.digest = hashlib.sha256(what.encode()).hexdigest()[:16]

    @property
    def attached(self) -> int:
        """Workers that can take part."""
        return sum(member.attached for member in self._members)

    # A target's

    def start(self, number: int, spans: Sequence[Span]) -> None:
        """Send the flight to every worker that can take part."""
        now_s = time.monotonic()
        self._flights[number] = _Flight(spans, now_s, set(range(len(self._members))))
        for member in self._members:
            if not member.take_part(number, spans, now_s):
                member.pass_over(spans)

    def keep(self, slot: int, path: Sequence[int]) -> None:
        """Every worker that was in the slot's last flight is told with its next step."""
        for member in self._members:
            member.keep(slot, path)

    def finished(self) -> Sequence[Scores]:
        """Hear the workers, see who is late, and land what is complete."""
        for index, member in enumerate(self._members):
            for number, rows in member.hear():
                flight = self._flights.get(number)
                if flight is not None and index in flight.missing:
                    flight.missing.discard(index)
                    flight.answers[index] = rows
            member.look_after()
            for number, flight in self._flights.items():
                if index in flight.missing and not member.owes(number):
                    member.take_part(number, flight.spans, time.monotonic())
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
        return [source for member in self._members for source in member.sources]

    @property
    def due_s(self) -> float | None:
        """Until somebody is late, or is to be asked again."""
        now_s = time.monotonic()
        dues = [member.due_s for member in self._members]
        for flight in self._flights.values():
            patience_s = self._federation.give_up_s if flight.late else self._federation.late_s
            dues.append(max(0.0, flight.started_s + patience_s - now_s))
        return min((due for due in dues if due is not None), default=None)

    @property
    def trouble(self) -> str:
        """Which workers cannot take part, or are late, and why."""
        return ", ".join(filter(None, (member.trouble for member in self._members)))

    @property
    def nodes(self) -> Mapping[str, bool]:
        """The workers."""
        return {member.name: member.takes_part for member in self._members}

    def close(self) -> None:
        """Close the connections."""
        for member in self._members:
            member.close()

    # Each flight

    def _hurry(self, number: int, flight: _Flight) -> None:
        """Do as the policy says with a flight that still waits for somebody."""
        age_s, of = time.monotonic() - flight.started_s, self._federation
        if age_s > of.late_s and not flight.late:
            flight.late = True
            for index in flight.missing:
                self._members[index].note("late")
        if of.late == "drop" and flight.answers:
            for index in list(flight.missing):
                if flight.late or not self._members[index].owes(number):
                    flight.missing.discard(index)
                    self._members[index].note("dropped")
        elif age_s > of.give_up_s or (of.late == "fail" and flight.late):
            del self._flights[number]
            names = ", ".join(self._members[index].name for index in flight.missing)
            error = TargetLostError(
                f"Of this edge's federation {names} did not answer within {age_s:.1f} s."
            )
            self._landed.append(Scores(number, error=error))

    def _land(self, number: int, flight: _Flight) -> None:
        del self._flights[number]
        self._tell_of_changes(flight)
        try:
            self._landed.append(Scores(number, self._averaged(flight)))
        except Exception as error:  # no memory, say: whatever ails this flight, the edge goes on
            self._landed.append(Scores(number, error=error))

    def _averaged(self, flight: _Flight) -> list[Output]:
        """The logits of each span."""
        present = sorted(flight.answers)
        answers = []
        if flight.rows:
            # [Σ rows, V]
            p = aggregate(
                [self._members[index].weight for index in present],
                [flight.answers[index] for index in present],
                self._vocab,
                self._federation.reconstruction,
            )
        end = 0
        for span in flight.spans:
            begin, end = end, end + span.rows
            logits = as_logits(p[begin:end], span.temperature) if span.rows else _NOTHING
            answers.append(Output(logits, _NOTHING))
        return answers

    def _tell_of_changes(self, flight: _Flight) -> None:
        """Log who is left out of the ensemble from this flight on, and who is back."""
        for index, member in enumerate(self._members):
            left_out = index not in flight.answers
            if left_out and not member.left_out:
                why = member.trouble or f"{member.name}: left out"
                _log.warning("%s; passes go on by the other weights", why)
            elif member.left_out and not left_out:
                _log.info("%s takes part again", member.name)
            member.left_out = left_out


def open_target(opening: Opening) -> FederatedTarget:
    """The federation that the list names, when all its workers are attached.

    Under ``drop`` it begins without those that do not come within ``give_up_s``, if one does.
    """
    path = opening.config.nodes
    if path is None:
        raise ConfigError("A federation needs a list of its workers (--federate FILE).")
    if (sessions := opening.config.limits.sessions) > MAX_ITEMS:
        raise UnsupportedError(f"--sessions {sessions}: a step to a worker has {MAX_ITEMS} slots.")
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
