"""Target as a weighted ensemble of workers (specfed §II-§III; docs/papers.md).

In:  passes, which every worker computes with its own model on its own machine.
Out: scores: logits of p_agg = Σ w_m p̃_m at every requested row, where p̃_m is rebuilt from the top
     K of worker m (`speculation.ensemble`).

A worker is *late* if it has not answered within ``late_s``, and *gone* if it is not attached. The
federation's policy decides about a pass with such a worker: ``wait`` for the worker, up to
``give_up_s``; ``drop`` the worker from the pass and renormalise the other weights; or ``fail`` the
pass. A worker with a malformed answer is gone until it is attached again. The metrics count all
these events. Tokens that a worker has missed are sent with its next step. Under ``drop``, many
missed tokens are sent in a separate step, while the other workers continue.

The ensemble has no hidden states. Its logits are valid only for the request's temperature; top-k
and top-p truncate the average. Bias, penalties and grammars change the logits of each worker,
before its softmax and its top K: p_m is the distribution of the processed logits.
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import zmq
from numpy.typing import NDArray

from pilotfish.base.errors import ConfigError, TargetLostError, UnsupportedError
from pilotfish.edge_runtime.step_options import StatedWorks, state_works
from pilotfish.edge_runtime.targets.node_client import NodeAddress, expect_encrypted
from pilotfish.edge_runtime.targets.node_list import Federation, read_addresses, read_node_list
from pilotfish.edge_runtime.targets.remote import RemotePass, RemoteTarget
from pilotfish.edge_runtime.targets.target import (
    FIRST_TRIAL,
    TargetOptions,
    try_pass,
    wait_for_nodes,
)
from pilotfish.edge_runtime.targets.worker_client import DEPTH, WorkerClient
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Work
from pilotfish.engines.language_model import Output
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.speculation.ensemble import TopRows, acceptance_bound, aggregate, as_logits
from pilotfish.wire.nodes import MAX_ITEMS

_log = logging.getLogger("pilotfish.edge")

_NOTHING = np.empty((0, 0), np.float32)
# text at which the start measures how much probability is left out, and the number of its last rows
_SAMPLE = (
    "The river rose in the night. By morning the lower road was under water, and the people of the "
    "village carried what they could up the hill to the old school, where"
)
_SAMPLE_ROWS = 16


@dataclass(eq=False)
class _EnsemblePass(RemotePass):
    """Pass under way.

    stated: its works with their options, encoded. missing: indices of workers that have not
    answered. rows: worker index → its answer.
    """

    stated: StatedWorks = field(kw_only=True)
    missing: set[int] = field(default_factory=set)
    rows: dict[int, list[TopRows]] = field(default_factory=dict)
    late: bool = False  # whether its late workers have been counted


class FederatedTarget(RemoteTarget[_EnsemblePass]):
    """Target that runs each pass at all workers and averages their answers by weight."""

    has_hidden_states = False
    model_logits = False
    depth = DEPTH

    def __init__(
        self, federation: Federation, addresses: Sequence[NodeAddress], options: TargetOptions
    ) -> None:
        super().__init__()
        manifest = options.artifact.manifest
        self._federation, self._metrics = federation, options.metrics
        self.vocab_size = manifest.vocab_size
        self.context = min(options.config.limits.context, manifest.dimensions.context)
        self.digest = ""
        self._workers: list[WorkerClient] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            for entry, address in zip(federation.worker, addresses, strict=True):
                self._workers.append(WorkerClient(entry, address, federation, options, self._clock))
            stack.pop_all()

    def fix_context(self) -> None:
        """Set context and digest from the attached workers; workers must fit them from now on."""
        for worker in self._workers:
            if worker.ready is not None and worker.ready.context < self.context:
                _log.warning(
                    "%s has room for only %d tokens per slot, which becomes this federation's "
                    "context, instead of %d",
                    worker.name,
                    worker.ready.context,
                    self.context,
                )
                self.context = worker.ready.context
        for worker in self._workers:
            worker.context = self.context
        workers = [(member.digest, member.weight) for member in self._workers]
        federation = self._federation
        cut = (federation.top_k, federation.mass) if federation.mass else federation.top_k
        identity = repr((workers, cut, federation.values, federation.reconstruction))
        self.digest = hashlib.sha256(identity.encode()).hexdigest()[:16]

    @property
    def attached(self) -> int:
        """Number of attached workers."""
        return sum(worker.attached for worker in self._workers)

    # Target interface

    def start(self, number: int, works: Sequence[Work]) -> None:
        """Send the pass to every worker that can take a step now."""
        now_s = self._clock.now_s
        everyone = set(range(len(self._workers)))
        stated = state_works(works, self.vocab_size)
        self._passes[number] = _EnsemblePass(number, works, now_s, stated=stated, missing=everyone)
        for worker in self._workers:
            worker.take_part(number, stated, now_s)

    def cached(self, slot: int, tokens: NDArray[np.uint32], rows: int) -> int:
        """Return the number of first tokens that the worker with most of them has cached."""
        return max(worker.cached(slot, tokens, rows) for worker in self._workers)

    def clear(self, slot: int) -> None:
        """Have each worker empty the slot at its next step."""
        for worker in self._workers:
            worker.clear(slot)

    def _work(self, now_s: float) -> None:
        """Process answers, apply the policy to late workers, and finish complete passes."""
        for index, worker in enumerate(self._workers):
            for number, rows in worker.receive():
                waiting = self._passes.get(number)
                if waiting is not None and index in waiting.missing:
                    waiting.missing.discard(index)
                    waiting.rows[index] = rows
            worker.attach_if_ready()
            for number, pending in self._passes.items():
                if index in pending.missing and not worker.awaits(number):
                    worker.take_part(number, pending.stated, self._clock.now_s)
        for pending in list(self._passes.values()):
            if pending.missing:
                self._apply_policy(pending, now_s)
            if not pending.missing:
                self._complete(pending)

    @property
    def sources(self) -> "Sequence[zmq.Socket[bytes] | int]":
        """Sockets and descriptors of the workers' connections."""
        return [source for worker in self._workers for source in worker.sources]

    def _deadlines(self) -> list[float]:
        """Return the times at which a worker becomes late, or is to be contacted again."""
        now_s = self._clock.now_s
        ends_s = [now_s + due for worker in self._workers if (due := worker.due_s) is not None]
        late_s = self._federation.late_s
        return ends_s + [
            pending.started_s + late_s for pending in self._passes.values() if not pending.late
        ]

    @property
    def problem(self) -> str:
        """Workers that take no part or are late, with the reasons; "" if there is none."""
        return ", ".join(filter(None, (worker.problem for worker in self._workers)))

    @property
    def status(self) -> str:
        """Mean retained mass ρ of the averaged rows, e.g. "ρ 0.876"; "" before the first row."""
        rows = self._metrics.ensemble_rows
        return f"ρ {1.0 - self._metrics.ensemble_omitted / rows:.3f}" if rows else ""

    @property
    def nodes(self) -> Mapping[str, bool]:
        """Worker name → whether the worker takes part."""
        return {worker.name: worker.takes_part for worker in self._workers}

    def close(self) -> None:
        """Close the connections to all workers."""
        for worker in self._workers:
            worker.close()

    # Passes

    def _apply_policy(self, pending: _EnsemblePass, now_s: float) -> None:
        """Count the pass's late workers; under ``drop``, continue the pass without them."""
        federation = self._federation
        if now_s >= pending.started_s + federation.late_s and not pending.late:
            pending.late = True
            for index in pending.missing:
                self._workers[index].record_event("late")
        if federation.late == "drop" and pending.rows:
            for index in list(pending.missing):
                if pending.late or not self._workers[index].awaits(pending.number):
                    pending.missing.discard(index)
                    self._workers[index].record_event("dropped")

    def _timeout_at(self, pending: _EnsemblePass) -> float:
        federation = self._federation
        if federation.late == "drop" and pending.rows:
            return math.inf
        return pending.started_s + (
            federation.late_s if federation.late == "fail" else federation.give_up_s
        )

    def _timeout_message(self, pending: _EnsemblePass, now_s: float) -> str:
        names = ", ".join(self._workers[index].name for index in pending.missing)
        age_s = now_s - pending.started_s
        return f"In this edge's federation, {names} did not answer within {age_s:.1f} s."

    def _complete(self, pending: _EnsemblePass) -> None:
        self._log_changes(pending)
        try:
            self._finish(pending, self._average(pending))
        except Exception as error:  # for example a MemoryError; only this pass fails
            self._fail(pending, error)

    def _average(self, pending: _EnsemblePass) -> list[Output]:
        """Average the workers' rows; return the logits of each work."""
        present = sorted(pending.rows)
        weights = [self._workers[index].weight for index in present]
        outputs = []
        if any(work.rows for work in pending.works):
            answers = [pending.rows[index] for index in present]
            scheme = self._federation.reconstruction
            masks = pending.stated.masks
            # [Σ rows, V]; all rows at once, or each row if workers choose K
            parts, begin = [], 0
            for rows in zip(*answers, strict=True):
                end = begin + len(rows[0])
                part = None if masks is None else masks[begin:end]
                parts.append(aggregate(weights, rows, self.vocab_size, scheme, part))
                begin = end
            p = np.concatenate(parts)
            # [M, Σ rows], and [Σ rows]
            retained = np.stack(
                [np.concatenate([rows.retained_mass for rows in answer]) for answer in answers]
            )
            omitted = acceptance_bound(weights, retained)
            if pending.number < FIRST_TRIAL:
                names = [self._workers[index].name for index in present]
                self._metrics.record_average(dict(zip(names, retained, strict=True)), omitted)
        end = 0
        for work in pending.works:
            begin, end = end, end + work.rows
            if not work.rows:
                outputs.append(Output(_NOTHING, _NOTHING))
                continue
            logits = as_logits(p[begin:end], work.temperature)
            outputs.append(Output(logits, _NOTHING, omitted[begin:end]))
        return outputs

    def _log_changes(self, pending: _EnsemblePass) -> None:
        """Log each worker that takes no part since this pass, or takes part again."""
        for index, worker in enumerate(self._workers):
            left_out = index not in pending.rows
            if left_out and not worker.left_out:
                why = worker.problem or f"{worker.name}: left out"
                _log.warning("%s; passes continue with the other workers' weights", why)
            elif worker.left_out and not left_out:
                _log.info("%s takes part again", worker.name)
            worker.left_out = left_out


def open_target(options: TargetOptions) -> FederatedTarget:
    """Open the listed federation; return the target when all workers are attached.

    Under ``drop`` the target starts after ``give_up_s`` even if workers are missing; at least one
    must be attached.
    """
    path = options.config.nodes
    if path is None:
        raise ConfigError("A federation needs a list of its workers (--federate FILE).")
    if (sessions := options.config.limits.sessions) > MAX_ITEMS:
        raise UnsupportedError(
            f"--sessions {sessions} is too large: a step to a worker has at most {MAX_ITEMS} slots."
        )
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
    if federation.reconstruction == "spread":
        _warn_of_spread(target, federation, options.artifact)
    return target


def _warn_of_spread(target: FederatedTarget, federation: Federation, artifact: Artifact) -> None:
    """Measure and log the share of sampled tokens that ``spread`` chooses without a model."""
    tokens = np.array(Tokenizer(artifact).encode(_SAMPLE)[: target.context], np.uint32)
    omitted = try_pass(target, tokens, min(len(tokens), _SAMPLE_ROWS)).omitted
    if omitted is not None and federation.top_k < artifact.manifest.vocab_size:
        _log.warning(
            'reconstruction "spread" gives all tokens that a worker does not send the same '
            "probability: about %.2g %% of the tokens sampled at temperature 1 will be arbitrary, "
            "more at higher temperatures and after such tokens; "
            '"renormalise" samples none of them',
            100.0 * float(omitted.mean()),
        )
