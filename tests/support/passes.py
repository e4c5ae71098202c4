"""The serving loop's part of a target pass, for tests of the scheduler without one."""

from __future__ import annotations

from pilotfish.edge_runtime.scheduler import Job, Scheduler


def run(scheduler: Scheduler) -> list[Job]:
    """Start a pass, if there is one to make, and return the jobs that are done by now."""
    batch = scheduler.next_batch()
    if batch is not None:
        scheduler.target.start(batch.number, batch.spans)
    return collect(scheduler)


def collect(scheduler: Scheduler) -> list[Job]:
    """The jobs of the passes that have come back."""
    return [job for scores in scheduler.target.finished() for job in scheduler.rule(scores)]
