"""Run the whole: one process for each provider, watched, within a time.

A provider's process may crash or hang, as libraries of GPUs do: that is a finding, and a new
process goes on with the artifact after it.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from pilotfish.base.child import ChildProcess
from pilotfish.engines.runtime import runtime_version
from pilotfish.field.host import facts
from pilotfish.selftest.check_artifacts import CheckArtifacts, Show
from pilotfish.selftest.check_result import CheckResult, Status
from pilotfish.selftest.providers import BUILDING
from pilotfish.selftest.worker import OPENING, Assignment, ProviderJob

COMMAND = (sys.executable, "-m", "pilotfish.selftest.worker")
TICK_S = 1.0
SILENT_S = 120.0  # of one check; engines may take all the time to be built
LOOK_S = 60.0  # to find out whether a provider is there

FORMAT = 1


class Presence(Struct, frozen=True, omit_defaults=True):
    """Whether a provider is there; `reason` says why not, `machine` has GPU and versions."""

    there: bool
    reason: str = ""
    machine: dict[str, str] = {}


class SelfTest(Struct, kw_only=True):
    """All that was found; what `--json` writes.

    Attributes:
        machine: its facts, and `load`: how many threads wanted to run when it began.
        times: the median and the least ms of a pass, by S, of each artifact that was timed.
        left_out: what was not tried, and why.
    """

    format: int = FORMAT
    passed: bool = True
    seconds: float = 0.0
    machine: dict[str, Any] = {}
    providers: dict[str, Presence] = {}
    findings: list[CheckResult] = []
    times: list[dict[str, Any]] = []
    left_out: list[str] = []


class Runner:
    """Tries providers one after the other; `show(label, done, total)` draws progress."""

    def __init__(
        self, show: Show, *, minutes: float, quick: bool, command: Sequence[str] = COMMAND
    ) -> None:
        self._show, self._quick, self._command = show, quick, command
        self._minutes = minutes
        self._begin = time.monotonic()
        load = round(os.getloadavg()[0], 2)
        self.found = SelfTest(machine=facts() | {"load": load})

    def run(self, providers: Sequence[str]) -> SelfTest:
        """Try these providers.

        Raises:
            ProviderError: if there is no ONNX Runtime, and so no CPU to compare with.
        """
        with tempfile.TemporaryDirectory(prefix="pilotfish-selftest-") as folder:
            shelf = CheckArtifacts(Path(folder), self._show)
            runtime_version()  # raises if ONNX Runtime is missing
            for provider in providers:
                self._look(provider)
            for provider in providers:
                if self.found.providers[provider].there:
                    self.attempt(provider, shelf.jobs(provider, quick=self._quick))
        if self._quick:
            self.found.left_out.append("the default model: --quick")
        elif shelf.missing:
            self.found.left_out.append(f"the default model: {shelf.missing}")
        bad = [each for each in self.found.findings if each.status in ("differs", "failed")]
        self.found.passed = not bad
        self.found.seconds = round(time.monotonic() - self._begin, 1)
        return self.found

    def attempt(self, provider: str, jobs: Sequence[ProviderJob]) -> None:
        """Do these jobs; after a crash, those behind the one that crashed."""
        total = sum(len(job.checks) for job in jobs)
        while jobs:
            watch = JobWatch(self, provider, jobs, total)
            jobs = jobs[watch.follow(self._command) :]

    @property
    def out_of_time(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() - self._begin > self._minutes * 60

    def describe_left_out(self) -> str:
        """Say that the time was over."""
        return f"{self._minutes:g} minutes were over: --minutes gives more"

    def progress(self, provider: str, job: ProviderJob, check: str, done: int, total: int) -> None:
        """Show what is done now."""
        building = check == OPENING and provider in BUILDING
        doing = ", building its engine" if building else ""
        self._show(f"{provider}: {job.model}, {job.dialect}, {job.precision}{doing}", done, total)

    def _look(self, provider: str) -> None:
        """Find out whether a provider is there, in a process of its own."""
        child = ChildProcess([*self._command, _order(provider, ())], LOOK_S)
        try:
            said = child.pipe.receive() or {"absent": "the process that looked for it died"}
        except TimeoutError:
            said = {"absent": f"it did not say within {LOOK_S:g} s whether it is there"}
        finally:
            child.stop(terminate=True)
        there = "absent" not in said
        self.found.providers = self.found.providers | {
            provider: Presence(there, said.get("absent", ""), said.get("machine", {}))
        }


class JobWatch:
    """One process of a provider."""

    def __init__(
        self, runner: Runner, provider: str, jobs: Sequence[ProviderJob], total: int
    ) -> None:
        self._runner, self._provider, self._jobs = runner, provider, jobs
        self._job, self._check, self._told = 0, OPENING, False
        self._total = total
        self._done = total - sum(len(job.checks) for job in jobs)

    def follow(self, command: Sequence[str]) -> int:
        """Follow the process to its end; return how many of the jobs are over."""
        child = ChildProcess([*command, _order(self._provider, self._jobs)], TICK_S)
        heard = time.monotonic()
        try:
            while True:
                try:
                    said = child.pipe.receive()
                except TimeoutError:
                    silent_s = time.monotonic() - heard
                    building = self._check == OPENING and self._provider in BUILDING
                    if not self._runner.out_of_time and (building or silent_s < SILENT_S):
                        continue
                    return self._stopped(silent_s)
                if said is None:
                    with suppress(Exception):
                        child.process.wait(TICK_S)
                    return self._ended(child.process.poll())
                heard = time.monotonic()
                self._hear(said)
                if self._runner.out_of_time:
                    return self._stopped(0.0)
        finally:
            child.stop(terminate=True)

    def _hear(self, said: dict[str, Any]) -> None:
        found = self._runner.found
        if doing := said.get("doing"):
            self._job, self._check, self._told = doing["job"], doing["check"], False
            job = self._jobs[self._job]
            self._runner.progress(self._provider, job, self._check, self._done, self._total)
            self._done += 1
        elif "finding" in said:
            found.findings = [*found.findings, msgspec.convert(said["finding"], CheckResult)]
            self._told = True
        elif "times" in said:
            found.times = [*found.times, said["times"]]
            self._told = True

    def _ended(self, code: int | None) -> int:
        """The process has ended, by itself or not."""
        if code == 0:
            return len(self._jobs)
        how = f"with exit code {code}"
        if code is not None and code < 0:
            how = f"by {signal.Signals(-code).name}"
        after = " after this check" if self._told else ""
        self._conclude(self._job, self._check, "failed", f"the process ended {how}{after}")
        return self._job + 1

    def _stopped(self, silent_s: float) -> int:
        """It is stopped: it said nothing for long, or the time is over."""
        if not self._runner.out_of_time:
            why = f"nothing came for {silent_s:.0f} s"
            self._conclude(self._job, self._check, "failed", why)
            return self._job + 1
        if not self._told:
            self._conclude(self._job, self._check, "left out", self._runner.describe_left_out())
        for index in range(self._job + 1, len(self._jobs)):
            self._conclude(index, OPENING, "left out", self._runner.describe_left_out())
        return len(self._jobs)

    def _conclude(self, index: int, check: str, status: Status, reason: str) -> None:
        job = self._jobs[index]
        finding = CheckResult(
            provider=self._provider,
            model=job.model,
            precision=job.precision,
            dialect=job.dialect,
            check=check,
            status=status,
            reason=reason,
        )
        self._runner.found.findings = [*self._runner.found.findings, finding]


def _order(provider: str, jobs: Sequence[ProviderJob]) -> str:
    return msgspec.json.encode(Assignment(provider=provider, jobs=tuple(jobs))).decode()
