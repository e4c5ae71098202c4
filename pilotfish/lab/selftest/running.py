"""Run all checks within a time limit, in one watched process per provider.

GPU libraries may crash or hang a provider's process. Then the current check has failed, and a new
process continues with the next artifact.
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
from pilotfish.lab.host import facts
from pilotfish.lab.selftest.check_artifacts import CheckArtifacts, Show
from pilotfish.lab.selftest.check_result import CheckResult, Status
from pilotfish.lab.selftest.providers import BUILDING
from pilotfish.lab.selftest.worker import OPENING, Assignment, ProviderJob

COMMAND = (sys.executable, "-m", "pilotfish.lab.selftest.worker")
TICK_S = 1.0
# maximum time without a message during a check (s); engine builds have no such limit
MOST_SILENCE_S = 120.0
PRESENCE_S = 60.0  # time limit (s) of the process that finds out whether a provider is present

FORMAT = 1


class Presence(Struct, frozen=True, omit_defaults=True):
    """The presence of a provider: the reason if it is absent, and its GPU and versions if not."""

    there: bool
    reason: str = ""
    machine: dict[str, str] = {}


class SelfTest(Struct, kw_only=True):
    """All results of a self-test; `--json` writes this structure.

    Attributes:
        machine: facts about the machine; `load` is its load average at the start.
        doctor: the examination of the machine before the checks (`lab.doctor.examination`).
        times: times of a pass over S tokens (median and minimum, ms), by S, for each timed
            artifact.
        left_out: skipped parts of the self-test, each with the reason.
    """

    format: int = FORMAT
    passed: bool = True
    seconds: float = 0.0
    machine: dict[str, Any] = {}
    doctor: dict[str, Any] = {}
    providers: dict[str, Presence] = {}
    findings: list[CheckResult] = []
    times: list[dict[str, Any]] = []
    left_out: list[str] = []


class Runner:
    """Checks one provider after the other; `show(label, done, total)` displays the progress."""

    def __init__(
        self, show: Show, *, minutes: float, quick: bool, command: Sequence[str] = COMMAND
    ) -> None:
        self._show, self._quick, self._command = show, quick, command
        self._minutes = minutes
        self._begin = time.monotonic()
        load = round(os.getloadavg()[0], 2)
        self.report = SelfTest(machine=facts() | {"load": load})

    def run(self, providers: Sequence[str]) -> SelfTest:
        """Check these providers.

        Raises:
            ProviderError: if ONNX Runtime is not installed: the reference needs it.
        """
        with tempfile.TemporaryDirectory(prefix="pilotfish-selftest-") as folder:
            artifacts = CheckArtifacts(Path(folder), self._show)
            runtime_version()  # raises if ONNX Runtime is missing
            for provider in providers:
                self._look_for(provider)
            for provider in providers:
                if self.report.providers[provider].there:
                    self.attempt(provider, artifacts.jobs(provider, quick=self._quick))
        if self._quick:
            self.report.left_out.append("the default model: --quick leaves it out")
        elif artifacts.missing:
            self.report.left_out.append(f"the default model: {artifacts.missing}")
        failures = [each for each in self.report.findings if each.status in ("differs", "failed")]
        self.report.passed = not failures
        self.report.seconds = round(time.monotonic() - self._begin, 1)
        return self.report

    def attempt(self, provider: str, jobs: Sequence[ProviderJob]) -> None:
        """Run a provider's jobs; after a crash, continue with the next job."""
        total = sum(len(job.checks) for job in jobs)
        while jobs:
            watch = JobWatch(self, provider, jobs, total)
            jobs = jobs[watch.follow(self._command) :]

    @property
    def is_out_of_time(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() - self._begin > self._minutes * 60

    def describe_left_out(self) -> str:
        """Return the reason for checks that were skipped because the time limit had passed."""
        return f"the time limit of {self._minutes:g} minutes had passed: raise it with --minutes"

    def progress(self, provider: str, job: ProviderJob, check: str, done: int, total: int) -> None:
        """Display the current check."""
        building = check == OPENING and provider in BUILDING
        suffix = ", building its engine" if building else ""
        self._show(f"{provider}: {job.model}, {job.dialect}, {job.precision}{suffix}", done, total)

    def _look_for(self, provider: str) -> None:
        """Find out, in a separate process, whether a provider is present."""
        child = ChildProcess([*self._command, _encode_assignment(provider, ())], PRESENCE_S)
        try:
            message = child.pipe.receive() or {
                "absent": "the process that looked for this provider died"
            }
        except TimeoutError:
            message = {
                "absent": "the process that looked for this provider did not report within "
                f"{PRESENCE_S:g} s"
            }
        finally:
            child.stop(terminate=True)
        there = "absent" not in message
        self.report.providers = self.report.providers | {
            provider: Presence(there, message.get("absent", ""), message.get("machine", {}))
        }


class JobWatch:
    """Watches a provider's process and collects its results."""

    def __init__(
        self, runner: Runner, provider: str, jobs: Sequence[ProviderJob], total: int
    ) -> None:
        self._runner, self._provider, self._jobs = runner, provider, jobs
        self._job, self._check, self._has_result = 0, OPENING, False
        self._total = total
        self._done = total - sum(len(job.checks) for job in jobs)

    def follow(self, command: Sequence[str]) -> int:
        """Start the process, watch it until it ends, and return the number of finished jobs."""
        child = ChildProcess([*command, _encode_assignment(self._provider, self._jobs)], TICK_S)
        last_message = time.monotonic()
        try:
            while True:
                try:
                    message = child.pipe.receive()
                except TimeoutError:
                    silent_s = time.monotonic() - last_message
                    building = self._check == OPENING and self._provider in BUILDING
                    if not self._runner.is_out_of_time and (building or silent_s < MOST_SILENCE_S):
                        continue
                    return self._on_stop(silent_s)
                if message is None:
                    with suppress(Exception):
                        child.process.wait(TICK_S)
                    return self._on_exit(child.process.poll())
                last_message = time.monotonic()
                self._handle(message)
                if self._runner.is_out_of_time:
                    return self._on_stop(0.0)
        finally:
            child.stop(terminate=True)

    def _handle(self, message: dict[str, Any]) -> None:
        report = self._runner.report
        if doing := message.get("doing"):
            self._job, self._check, self._has_result = doing["job"], doing["check"], False
            job = self._jobs[self._job]
            self._runner.progress(self._provider, job, self._check, self._done, self._total)
            self._done += 1
        elif "finding" in message:
            report.findings = [*report.findings, msgspec.convert(message["finding"], CheckResult)]
            self._has_result = True
        elif "times" in message:
            report.times = [*report.times, message["times"]]
            self._has_result = True

    def _on_exit(self, code: int | None) -> int:
        """Record how the process ended; return the number of finished jobs."""
        if code == 0:
            return len(self._jobs)
        cause = f"with exit code {code}"
        if code is not None and code < 0:
            cause = f"by {signal.Signals(-code).name}"
        after = " after this check" if self._has_result else ""
        self._add_result(self._job, self._check, "failed", f"the process ended {cause}{after}")
        return self._job + 1

    def _on_stop(self, silent_s: float) -> int:
        """Record why the process was stopped: long silence, or the end of the time limit."""
        if not self._runner.is_out_of_time:
            cause = f"the process sent no message for {silent_s:.0f} s and was stopped"
            self._add_result(self._job, self._check, "failed", cause)
            return self._job + 1
        if not self._has_result:
            self._add_result(self._job, self._check, "left out", self._runner.describe_left_out())
        for index in range(self._job + 1, len(self._jobs)):
            self._add_result(index, OPENING, "left out", self._runner.describe_left_out())
        return len(self._jobs)

    def _add_result(self, index: int, check: str, status: Status, reason: str) -> None:
        job = self._jobs[index]
        result = CheckResult(
            provider=self._provider,
            model=job.model,
            precision=job.precision,
            dialect=job.dialect,
            check=check,
            status=status,
            reason=reason,
        )
        self._runner.report.findings = [*self._runner.report.findings, result]


def _encode_assignment(provider: str, jobs: Sequence[ProviderJob]) -> str:
    return msgspec.json.encode(Assignment(provider=provider, jobs=tuple(jobs))).decode()
