"""Bound the run file of a watch: delete its oldest rounds by age, and by the file's size."""

from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run_facts import Watch

_FULL = 0.9  # share of the size at which deleting begins, since SQLite's log needs room, too
_PORTION = 0.02  # share of the file's time that is deleted at once


def forget_old(recorder: Recorder, watch: Watch, clock_s: float) -> None:
    """Delete the rounds and outages that are too old by now; the facts stay.

    If the rows take too many bytes, the oldest rounds go, too. Only if the present round is alone
    too large, as many outages may make it, a part of it goes. clock_s: the run's clock.
    """
    if watch.keep_s is not None and clock_s > watch.keep_s:
        recorder.forget(_round_start(clock_s - watch.keep_s, watch.every_s))
    while watch.most_bytes is not None and recorder.used_bytes() > _FULL * watch.most_bytes:
        oldest_s = recorder.oldest_s()
        if oldest_s is None or oldest_s > clock_s:
            return
        until_s = oldest_s + _PORTION * (clock_s - oldest_s)
        if oldest_s < _round_start(clock_s, watch.every_s):
            until_s = _round_start(max(until_s, oldest_s + watch.every_s), watch.every_s)
        recorder.forget(max(until_s, oldest_s + 1e-6))


def _round_start(clock_s: float, every_s: float) -> float:
    """Return when the round began to which this time belongs."""
    return clock_s // every_s * every_s
