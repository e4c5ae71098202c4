"""Check one provider, in the process that `pilotfish selftest` starts for this provider.

    python -m pilotfish.lab.selftest.worker ORDER DESCRIPTOR

ORDER is an `Assignment` as JSON. DESCRIPTOR is the number of a pipe. The process writes every event
into the pipe as a line of JSON. If the process dies, only its current check is lost. The lines are:

    {"absent": reason}                      the provider is absent; no other line follows
    {"machine": {...}}                      GPU and versions
    {"doing": {"job": 3, "check": "tree"}}  the check that begins
    {"finding": {...}}, {"times": {...}}    the result of this check
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from pilotfish.base.child import ChildPipe
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Engine, open_engine
from pilotfish.engines.engine_errors import ProviderError, TreeError
from pilotfish.engines.stage import PROVIDERS as STAGED
from pilotfish.lab.selftest import protocols
from pilotfish.lab.selftest.check_result import CheckResult, worst_row
from pilotfish.lab.selftest.checks import CHECKS, CONTEXT, SLOTS, PlainReference, empty_slots
from pilotfish.lab.selftest.providers import describe, tolerance, why_absent, why_unable
from pilotfish.lab.selftest.stage_chain import StageChain, stage_checks
from pilotfish.lab.selftest.timing import pass_times

Tell = Callable[[dict[str, Any]], None]

OPENING, STAGES, TIMES = "opening", "stages", "times"
CHECKED = (OPENING, *CHECKS, STAGES)


class ProviderJob(Struct, frozen=True, kw_only=True):
    """One artifact to check.

    Attributes:
        reference: artifact with the same weights and precision for the CPU; None: the provider's
            artifact is only timed.
        cut: folder with the artifact's stages.
        drafter: artifact with the same weights but flatter logits, with which the protocols run;
            None: the protocols are not checked.
        timed: whether passes are timed.
        threads: number of CPU threads; None: the default. Tiny models are fastest on one thread.
    """

    model: str
    dialect: str
    precision: str
    artifact: str
    reference: str | None = None
    cut: str | None = None
    drafter: str | None = None
    timed: bool = False
    threads: int | None = None

    @property
    def checks(self) -> list[str]:
        """The names of the checks to run, in order, each once."""
        names = [OPENING]
        names += [TIMES] * self.timed
        names += CHECKS if self.reference else ()
        names += [STAGES] * (self.cut is not None)
        return names + [*protocols.LOSSLESS] * (self.drafter is not None)


class Assignment(Struct, frozen=True, kw_only=True):
    """The jobs of a worker process. Without jobs, the process only looks for the provider."""

    provider: str
    jobs: tuple[ProviderJob, ...] = ()


def attempt(assignment: Assignment, tell: Tell) -> None:
    """Run all jobs; an error fails only the check that raised it."""
    if (absent := why_absent(assignment.provider)) is not None:
        tell({"absent": absent})
        return
    tell({"machine": describe(assignment.provider)})
    for index, job in enumerate(assignment.jobs):
        Attempt(assignment.provider, index, job, tell).run()


class Attempt:
    """The run of one job on one provider."""

    def __init__(self, provider: str, index: int, job: ProviderJob, tell: Tell) -> None:
        self._provider, self._index, self._job, self._tell = provider, index, job, tell
        self._tolerance = tolerance(provider, job.precision)

    def run(self) -> None:
        """Run the job's checks, and report their results."""
        job = self._job
        artifact = Artifact.open(job.artifact)
        if reason := why_unable(self._provider, artifact.manifest):
            self._report(OPENING, "left out", reason=reason)
            return
        with ExitStack() as stack:
            engine = self._run_guarded(OPENING, lambda: self._open(artifact))
            if engine is None:
                return
            if job.timed:
                times = self._run_guarded(TIMES, lambda: pass_times(engine))
                if times is not None:
                    self._tell({"times": self._names() | times._asdict()})
            if job.reference is not None:
                plain = PlainReference(Artifact.open(job.reference), job.threads)
                for name in CHECKS:
                    self._run_guarded(name, partial(self._compare, name, engine, plain))
                if job.cut is not None:
                    self._check_stages(job.cut, plain)
            if job.drafter is not None:
                self._check_protocols(job.artifact, job.drafter, stack)

    def _open(self, artifact: Artifact) -> Engine:
        begin = time.perf_counter()
        engine = open_engine(
            artifact,
            slots=SLOTS,
            context=CONTEXT,
            threads=self._job.threads,
            provider=self._provider,
        )
        self._report(OPENING, "passed", seconds=time.perf_counter() - begin)
        return engine

    def _compare(self, name: str, runner: Any, plain: PlainReference, check: Any = None) -> None:
        begin = time.perf_counter()
        empty_slots(runner)
        try:
            result = worst_row((check or CHECKS[name])(runner, plain))
        except TreeError as error:
            if plain.trees:
                raise
            self._report(name, "not there", reason=str(error))
            return
        finite = result.difference != float("inf")
        self._report(
            name,
            "passed" if result.difference <= self._tolerance else "differs",
            reason="" if finite else "the outputs contain NaN or infinite numbers",
            difference=result.difference if finite else None,
            largest=result.largest if finite else None,
            where=result.where,
            tolerance=self._tolerance,
            seconds=time.perf_counter() - begin,
        )

    def _check_stages(self, folder: str, plain: PlainReference) -> None:
        if self._provider not in STAGED:
            supported = " and ".join(STAGED)
            self._report(STAGES, "left out", reason=f"stages of a model run on {supported}")
            return
        self._run_guarded(
            STAGES,
            lambda: self._compare(
                STAGES, StageChain(Path(folder), self._provider), plain, stage_checks
            ),
        )

    def _check_protocols(self, target: str, drafter: str, stack: ExitStack) -> None:
        names = list(protocols.LOSSLESS)
        ends = protocols.both_ends(target, drafter, self._provider)
        device = self._run_guarded(names[0], lambda: stack.enter_context(ends))
        for name in names if device else ():
            self._run_guarded(name, partial(self._compare_protocol, name, device))

    def _compare_protocol(self, name: str, device: Any) -> None:
        begin = time.perf_counter()
        divergence = protocols.first_difference(device, name)
        self._report(
            name,
            "differs" if divergence else "passed",
            where=str(divergence or ""),
            seconds=time.perf_counter() - begin,
        )

    def _run_guarded(self, check: str, work: Callable[[], Any]) -> Any:
        """Run a check; if it raises an error, report a failed check and return None."""
        self._tell({"doing": {"job": self._index, "check": check}})
        try:
            return work()
        # any exception, because libraries raise their own classes and plain RuntimeError
        except Exception as error:
            message = (str(error).strip() or "no message").splitlines()[0]
            expected = isinstance(error, ProviderError)
            self._report(
                check,
                "failed",
                reason=message if expected else f"{type(error).__name__}: {message}",
            )
            return None

    def _names(self) -> dict[str, str]:
        job = self._job
        return {
            "provider": self._provider,
            "model": job.model,
            "precision": job.precision,
            "dialect": job.dialect,
        }

    def _report(self, check: str, status: Any, *, seconds: float = 0.0, **details: Any) -> None:
        fields: dict[str, Any] = {**self._names(), **details}
        result = CheckResult(check=check, status=status, seconds=round(seconds, 3), **fields)
        self._tell({"finding": msgspec.to_builtins(result)})


def main(arguments: list[str]) -> int:
    """Run the assignment in ``arguments`` as a worker process."""
    order, descriptor = arguments
    os.dup2(2, 1)  # libraries print to stdout; this sends their text to stderr instead
    logging.basicConfig(level=logging.ERROR)
    pipe = ChildPipe(socket.socket(fileno=int(descriptor)))
    attempt(msgspec.json.decode(order, type=Assignment), pipe.send)
    pipe.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
