"""Run the scheduler's passes in tests without a serving loop."""

from __future__ import annotations

from pilotfish.edge_runtime.scheduler import Job, Scheduler


def run(scheduler: Scheduler) -> list[Job]:
    """Start a pass if one can start, and return the finished jobs."""
    batch = scheduler.next_batch()
    if batch is not None:
        number, jobs = batch
        scheduler.target.start(number, [job.work for job in jobs])
    return collect(scheduler)


def collect(scheduler: Scheduler) -> list[Job]:
    """Return the jobs of finished passes."""
    return [
        job for scores in scheduler.target.collect_scores() for job in scheduler.finish_pass(scores)
    ]
