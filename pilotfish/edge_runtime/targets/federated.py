"""The target as a weighted ensemble of workers (specfed §II-§III; docs/papers.md).

In:  passes, which every worker makes by itself, with its own model on its own machine.
Out: scores: logits of Σ w_m p̃_m at every position of each window and at the bonus position,
     rebuilt from the top K that each worker has told.

A worker is *late* if it has not answered within ``late_s``, and *gone* if it is not attached. The
federation's policy decides on such a pass: ``wait`` for the worker, up to ``give_up_s``; ``drop``
it from the pass and renormalise the other weights; or ``fail`` the pass. A worker with a malformed
answer is gone until it is attached again. All these events are counted. Tokens that a worker has
missed are sent with its next step; under ``drop``, if they are many, in a step of their own while
the others go on.

The ensemble has no hidden states. Its logits are valid for the request's temperature
(`speculation.ensemble`); top-k and top-p act on the average.
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import zmq

from pilotfish.base.errors import ConfigError, TargetLostError, UnsupportedError
from pilotfish.edge_runtime.targets.node_client import NodeAddress, expect_encrypted
from pilotfish.edge_runtime.targets.node_list import Federation, read_addresses, read_node_list
from pilotfish.edge_runtime.targets.remote import RemotePass, RemoteTarget
from pilotfish.edge_runtime.targets.target import Span, TargetOptions, wait_for_nodes
from pilotfish.edge_runtime.targets.worker_client import DEPTH, WorkerClient
from pilotfish.engines.onnx_decoder import Output
from pilotfish.speculation.ensemble import TopRows, aggregate, as_logits
from pilotfish.wire.nodes import MAX_ITEMS

_log = logging.getLogger("pilotfish.edge")

_NOTHING = np.empty((0, 0), np.float32)


@dataclass(eq=False)
class _EnsemblePass(RemotePass):
    """A pass under way. missing: members that have not answered; rows: the others' answers."""

    missing: set[int] = field(default_factory=set)
    rows: dict[int, TopRows] = field(default_factory=dict)
    late: bool = False  # its late members were counted


class FederatedTarget(RemoteTarget[_EnsemblePass]):
    """Workers with their weights, and one policy for all."""

    has_hidden_states = False
    model_logits = False
    depth = DEPTH

    def __init__(
        self, federation: Federation, addresses: Sequence[NodeAddress], options: TargetOptions
    ) -> None:
        super().__init__()
        manifest = options.artifact.manifest
        self._federation = federation
        self._vocab = manifest.vocab_size
        self.context = min(options.config.limits.context, manifest.dimensions.context)
        self.digest = ""
        self._workers: list[WorkerClient] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            for listed, spot in zip(federation.worker, addresses, strict=True):
                self._workers.append(WorkerClient(listed, spot, federation, options, self._clock))
            stack.pop_all()

    def fix_context(self) -> None:
        """Fix context and digest by the attached workers; later changes make a worker unfit."""
        for member in self._workers:
            if member.ready is not None and member.ready.context < self.context:
                _log.warning(
                    "%s has room for %d tokens a slot: so has this federation, instead of %d",
                    member.name,
                    member.ready.context,
                    self.context,
                )
                self.context = member.ready.context
        for member in self._workers:
            member.context = self.context
        told = [(member.digest, member.weight) for member in self._workers]
        of = self._federation
        what = repr((told, of.kept, of.values, of.reconstruction))
        self.digest = hashlib.sha256(what.encode()).hexdigest()[:16]

    @property
    def attached(self) -> int:
        """Number of workers that can take part."""
        return sum(member.attached for member in self._workers)

    # A target's

    def start(self, number: int, spans: Sequence[Span]) -> None:
        """Send the pass to every worker that can take part."""
        now_s = self._clock.now_s
        everyone = set(range(len(self._workers)))
        self._passes[number] = _EnsemblePass(number, list(spans), now_s, missing=everyone)
        for member in self._workers:
            if not member.take_part(number, spans, now_s):
                member.skip(spans)

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep the path; each worker in the slot's last pass gets it with its next step."""
        for member in self._workers:
            member.keep_path(slot, path)

    def _work(self, now_s: float) -> None:
        """Take the workers' answers, apply the policy to late ones, and finish complete passes."""
        for index, member in enumerate(self._workers):
            for number, rows in member.receive():
                waiting = self._passes.get(number)
                if waiting is not None and index in waiting.missing:
                    waiting.missing.discard(index)
                    waiting.rows[index] = rows
            member.attach_if_ready()
            for number, one in self._passes.items():
                if index in one.missing and not member.awaits(number):
                    member.take_part(number, one.spans, self._clock.now_s)
        for one in list(self._passes.values()):
            if one.missing:
                self._apply_policy(one, now_s)
            if not one.missing:
                self._complete(one)

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """The workers' connections."""
        return [source for member in self._workers for source in member.sources]

    def _deadlines(self) -> list[float]:
        """The times at which a worker is late, or is to be asked again."""
        now_s = self._clock.now_s
        ends_s = [now_s + due for member in self._workers if (due := member.due_s) is not None]
        late_s = self._federation.late_s
        return ends_s + [one.started_s + late_s for one in self._passes.values() if not one.late]

    @property
    def problem(self) -> str:
        """The workers that cannot take part or are late, and why."""
        return ", ".join(filter(None, (member.problem for member in self._workers)))

    @property
    def nodes(self) -> Mapping[str, bool]:
        """The workers by name, and whether each takes part."""
        return {member.name: member.takes_part for member in self._workers}

    def close(self) -> None:
        """Close the connections."""
        for member in self._workers:
            member.close()

    # Each pass

    def _apply_policy(self, one: _EnsemblePass, now_s: float) -> None:
        """Count the workers that are late; under ``drop`` go on without them."""
        of = self._federation
        if now_s >= one.started_s + of.late_s and not one.late:
            one.late = True
            for index in one.missing:
                self._workers[index].note("late")
        if of.late == "drop" and one.rows:
            for index in list(one.missing):
                if one.late or not self._workers[index].awaits(one.number):
                    one.missing.discard(index)
                    self._workers[index].note("dropped")

    def _timeout_at(self, one: _EnsemblePass) -> float:
        of = self._federation
        if of.late == "drop" and one.rows:
            return math.inf
        return one.started_s + (of.late_s if of.late == "fail" else of.give_up_s)

    def _timeout_message(self, one: _EnsemblePass, now_s: float) -> str:
        names = ", ".join(self._workers[index].name for index in one.missing)
        age_s = now_s - one.started_s
        return f"Of this edge's federation {names} did not answer within {age_s:.1f} s."

    def _complete(self, one: _EnsemblePass) -> None:
        self._log_changes(one)
        try:
            self._finish(one, self._averaged(one))
        except Exception as error:  # such as MemoryError: only this pass fails
            self._fail(one, error)

    def _averaged(self, one: _EnsemblePass) -> list[Output]:
        """Average the workers' rows; returns each span's logits."""
        present = sorted(one.rows)
        outputs = []
        if any(span.rows for span in one.spans):
            # [Σ rows, V]
            p = aggregate(
                [self._workers[index].weight for index in present],
                [one.rows[index] for index in present],
                self._vocab,
                self._federation.reconstruction,
            )
        end = 0
        for span in one.spans:
            begin, end = end, end + span.rows
            logits = as_logits(p[begin:end], span.temperature) if span.rows else _NOTHING
            outputs.append(Output(logits, _NOTHING))
        return outputs

    def _log_changes(self, one: _EnsemblePass) -> None:
        """Log workers that are left out from this pass on, or are back."""
        for index, member in enumerate(self._workers):
            left_out = index not in one.rows
            if left_out and not member.left_out:
                why = member.problem or f"{member.name}: left out"
                _log.warning("%s; passes go on by the other weights", why)
            elif member.left_out and not left_out:
                _log.info("%s takes part again", member.name)
            member.left_out = left_out


def open_target(options: TargetOptions) -> FederatedTarget:
    """Open the listed federation; returns when all its workers are attached.

    Under ``drop`` it starts with the workers that are there after ``give_up_s``, at least one.
    """
    path = options.config.nodes
    if path is None:
        raise ConfigError("A federation needs a list of its workers (--federate FILE).")
    if (sessions := options.config.limits.sessions) > MAX_ITEMS:
        raise UnsupportedError(f"--sessions {sessions}: a step to a worker has {MAX_ITEMS} slots.")
    federation = read_node_list(path, Federation)
    addresses = read_addresses(path, federation.worker)
    expect_encrypted(path, addresses, options.keys)
    target = FederatedTarget(federation, addresses, options)
    try:
        wait_for_nodes(
            target,
            lambda: target.attached == len(addresses),
            options.on_idle,
            federation.give_up_s if federation.late == "drop" else None,
        )
        if not target.attached:
            raise TargetLostError(f"No worker of this federation can be used: {target.problem}.")
    except BaseException:
        target.close()
        raise
    target.fix_context()
    return target
