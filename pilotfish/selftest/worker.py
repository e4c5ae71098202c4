"""Try one provider: the process that `pilotfish selftest` starts for it.

    python -m pilotfish.selftest.worker ORDER DESCRIPTOR

ORDER is the JSON of an `Assignment`. What it does and finds is told over the tie, a line of JSON
each, so that of a process that dies everything is known but its last check:

    {"absent": reason}                      the provider is not there; nothing follows
    {"machine": {...}}                      GPU and versions
    {"doing": {"job": 3, "check": "tree"}}  what begins
    {"finding": {...}}, {"times": {...}}    what came of it
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
from pilotfish.engines.engine_errors import ProviderError, TreeError
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.stage import PROVIDERS as STAGED
from pilotfish.selftest import protocols
from pilotfish.selftest.check_result import CheckResult, worst
from pilotfish.selftest.checks import CHECKS, CONTEXT, SLOTS, PlainReference, empty
from pilotfish.selftest.providers import describe, tolerance, unable, why_absent
from pilotfish.selftest.stage_chain import StageChain, stages
from pilotfish.selftest.timing import pass_times

Tell = Callable[[dict[str, Any]], None]

OPENING, STAGES, TIMES = "opening", "stages", "times"
CHECKED = (OPENING, *CHECKS, STAGES)


class ProviderJob(Struct, frozen=True, kw_only=True):
    """One artifact to try.

    Attributes:
        reference: the artifact of the same weights and precision that the CPU runs; None: the
            artifact is only timed.
        cut: a folder of its stages.
        drafter: of the same weights, flatter: then protocols are tried, too.
        timed: whether passes are timed.
        threads: of the CPU; None: as a user's. Tiny models wait for threads more than they gain.
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
        """What will be done, in order; none of these names is there twice."""
        names = [OPENING]
        names += [TIMES] * self.timed
        names += CHECKS if self.reference else ()
        names += [STAGES] * (self.cut is not None)
        return names + [*protocols.LOSSLESS] * (self.drafter is not None)


class Assignment(Struct, frozen=True, kw_only=True):
    """What the process is to do; without jobs it only looks whether the provider is there."""

    provider: str
    jobs: tuple[ProviderJob, ...] = ()


def attempt(assignment: Assignment, tell: Tell) -> None:
    """Do all jobs; an error ends its check, not those after it."""
    if (absent := why_absent(assignment.provider)) is not None:
        tell({"absent": absent})
        return
    tell({"machine": describe(assignment.provider)})
    for index, job in enumerate(assignment.jobs):
        Attempt(assignment.provider, index, job, tell).run()


class Attempt:
    """One job on one provider."""

    def __init__(self, provider: str, index: int, job: ProviderJob, tell: Tell) -> None:
        self._provider, self._index, self._job, self._tell = provider, index, job, tell
        self._tolerance = tolerance(provider, job.precision)

    def run(self) -> None:
        """Check whatever the job asks for."""
        job = self._job
        artifact = Artifact.open(job.artifact)
        if reason := unable(self._provider, artifact.manifest):
            self._find(OPENING, "left out", reason=reason)
            return
        with ExitStack() as open_now:
            decoder = self._guarded(OPENING, lambda: self._open(artifact))
            if decoder is None:
                return
            if job.timed:
                times = self._guarded(TIMES, lambda: pass_times(decoder))
                if times is not None:
                    self._tell({"times": self._named() | times._asdict()})
            if job.reference is not None:
                plain = PlainReference(Artifact.open(job.reference), job.threads)
                for name in CHECKS:
                    self._guarded(name, partial(self._compare, name, decoder, plain))
                if job.cut is not None:
                    self._check_stages(job.cut, plain)
            if job.drafter is not None:
                self._check_protocols(job.artifact, job.drafter, open_now)

    def _open(self, artifact: Artifact) -> Decoder:
        begin = time.perf_counter()
        decoder = Decoder(
            artifact,
            slots=SLOTS,
            context=CONTEXT,
            threads=self._job.threads,
            provider=self._provider,
        )
        self._find(OPENING, "passed", seconds=time.perf_counter() - begin)
        return decoder

    def _compare(self, name: str, decoder: Any, plain: PlainReference, check: Any = None) -> None:
        begin = time.perf_counter()
        empty(decoder)
        try:
            found = worst((check or CHECKS[name])(decoder, plain))
        except TreeError as error:
            if plain.trees:
                raise
            self._find(name, "not there", reason=str(error))
            return
        finite = found.difference != float("inf")
        self._find(
            name,
            "passed" if found.difference <= self._tolerance else "differs",
            reason="" if finite else "the answers hold numbers that are not finite",
            difference=found.difference if finite else None,
            largest=found.largest if finite else None,
            where=found.where,
            tolerance=self._tolerance,
            seconds=time.perf_counter() - begin,
        )

    def _check_stages(self, folder: str, plain: PlainReference) -> None:
        if self._provider not in STAGED:
            able = " and ".join(STAGED)
            self._find(STAGES, "left out", reason=f"stages of a model run on {able}")
            return
        self._guarded(
            STAGES,
            lambda: self._compare(STAGES, StageChain(Path(folder), self._provider), plain, stages),
        )

    def _check_protocols(self, target: str, drafter: str, open_now: ExitStack) -> None:
        names = list(protocols.LOSSLESS)
        ends = protocols.both_ends(target, drafter, self._provider)
        device = self._guarded(names[0], lambda: open_now.enter_context(ends))
        for name in names if device else ():
            self._guarded(name, partial(self._follow, name, device))

    def _follow(self, name: str, device: Any) -> None:
        begin = time.perf_counter()
        parted = protocols.first_difference(device, name)
        self._find(
            name,
            "differs" if parted else "passed",
            where=str(parted or ""),
            seconds=time.perf_counter() - begin,
        )

    def _guarded(self, check: str, work: Callable[[], Any]) -> Any:
        """Do some work; if it raises, that is what was found, and None is returned."""
        self._tell({"doing": {"job": self._index, "check": check}})
        try:
            return work()
        except Exception as error:  # libraries raise their own classes and plain RuntimeError
            said = (str(error).strip() or "it says nothing").splitlines()[0]
            expected = isinstance(error, ProviderError)
            self._find(
                check, "failed", reason=said if expected else f"{type(error).__name__}: {said}"
            )
            return None

    def _named(self) -> dict[str, str]:
        job = self._job
        return {
            "provider": self._provider,
            "model": job.model,
            "precision": job.precision,
            "dialect": job.dialect,
        }

    def _find(self, check: str, status: Any, *, seconds: float = 0.0, **details: Any) -> None:
        named: dict[str, Any] = {**self._named(), **details}
        finding = CheckResult(check=check, status=status, seconds=round(seconds, 3), **named)
        self._tell({"finding": msgspec.to_builtins(finding)})


def main(arguments: list[str]) -> int:
    """Run as a process of its own."""
    order, descriptor = arguments
    os.dup2(2, 1)  # what libraries print is no part of the command's output
    logging.basicConfig(level=logging.ERROR)
    tie = ChildPipe(socket.socket(fileno=int(descriptor)))
    attempt(msgspec.json.decode(order, type=Assignment), tie.send)
    tie.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
