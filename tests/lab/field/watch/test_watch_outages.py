"""Outages of a watch: when they begin and end, and what is measured before and after."""

from __future__ import annotations

import math
import shutil
from contextlib import closing

import pytest

from pilotfish.lab.field.report.measured import read_run
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.watch.watch_file import open_watch
from tests.support import daemons
from tests.support.daemons import free_port, running
from tests.support.measuring import answers
from tests.support.relay import Relay
from tests.support.tiny import tiny_artifact
from tests.support.watching import (
    EVERY_S,
    JumpingClock,
    Plan,
    numbers,
    settings_of,
    watched,
)


def outages(out):
    with Run.open(out) as run:
        return list(run.outages())


def test_an_edge_that_is_away_is_an_outage(pair, out, prompts):
    """Away at the start, killed between rounds, and started again."""
    port = free_port()
    clock = JumpingClock()
    served = []
    flags = ["--target", pair.target, "--threads", 1, "--listen", f"tcp://127.0.0.1:{port}"]

    def serve():
        served.append((daemons.Daemon(*flags), clock.boot_s()))

    def kill():
        served[-1][0].kill()
        killed.append(clock.boot_s())

    class Serving(Plan):
        """Starts the edge when the watch has noticed that it is away."""

        def on_outage(self, outage):
            super().on_outage(outage)
            if outage.ended_clock_s is None:
                clock.ahead_s += 2.0 * EVERY_S
                serve()

    killed: list[float] = []
    plan = Serving({4: kill})
    begun_s = clock.boot_s()
    try:
        watched(settings_of(f"tcp://127.0.0.1:{port}", out, prompts, rounds=8), clock, plan)
    finally:
        for daemon, _ in served:
            daemon.kill()
    first, second = outages(out)
    assert "refuses the connection" in first.reason
    assert 0 <= first.began_clock_s < 1.0
    assert second.began_clock_s - (killed[0] - begun_s) < 2.5
    for outage, (_, at_s) in zip((first, second), served, strict=True):
        assert 0 <= outage.ended_clock_s - (at_s - begun_s) < 40
    assert len(plan.outages) == 4
    missed = sorted(set(range(8)) - set(numbers(out)))
    assert {0, 5} <= set(missed) <= {0, 1, 5, 6}
    with Run.open(out) as run:
        assert run.facts.target.name == "tiny"


@pytest.mark.parametrize(
    ("address", "name", "words"),
    [
        (None, "eve", "allow"),
        ("tcp://no-such-edge.invalid:7077", "alice", "no-such-edge.invalid"),
    ],
)
def test_what_only_an_operator_can_mend_is_an_outage(
    locked_edge, key_folders, out, prompts, address, name, words
):
    """The edge refuses the key, or DNS has no such host: the watch waits for the operator."""
    settings = settings_of(
        address or locked_edge.endpoint, out, prompts, rounds=0.02, keys=key_folders[name]
    )
    watched(settings, JumpingClock())
    (outage,) = outages(out)
    assert words in outage.reason
    assert outage.ended_clock_s is None
    assert not numbers(out)


class Breaking(Relay):
    """Breaks once it has brought so many bytes from the edge; at_s: when it did."""

    def __init__(self, target, clock, most_bytes):
        self._clock, self._left = clock, most_bytes
        self.at_s = 0.0
        super().__init__(target)

    def readers(self):
        return None, self._count

    def _count(self, data):
        self._left -= len(data)
        if self._left <= 0:
            self.turn_to(f"tcp://127.0.0.1:{free_port()}")
            self.at_s = self.at_s or self._clock.boot_s()
            raise OSError

    def mend(self, target):
        """Bring all bytes from now on."""
        self._left = math.inf
        self.turn_to(target)


@pytest.mark.parametrize(("most_bytes", "rounds"), [(500_000, 1), (1_500, 0)])
def test_an_outage_begins_with_the_last_message(edge, out, prompts, most_bytes, rounds):
    """The link breaks in the transfer of a probe, whose pings are kept, or in an answer."""
    clock = JumpingClock()
    with closing(Breaking(edge.endpoint, clock, most_bytes)) as relay:
        begun_s = clock.boot_s()
        watched(settings_of(relay.endpoint, out, prompts, rounds=0.1), clock)
    (outage,) = outages(out)
    assert len(numbers(out)) == rounds
    assert outage.began_clock_s == pytest.approx(relay.at_s - begun_s, abs=0.3)
    with Run.open(out) as run:
        probes = list(run.probes())
    assert [probe.down_bps for probe in probes] == [None] * rounds


def test_a_warm_up_that_an_outage_cuts_off_comes_again(edge, out, prompts):
    clock = JumpingClock()
    with closing(Breaking(edge.endpoint, clock, 1_500)) as relay:

        class Mending(Plan):
            def on_outage(self, outage):
                super().on_outage(outage)
                relay.mend(edge.endpoint)

        watched(settings_of(relay.endpoint, out, prompts, rounds=3), clock, Mending())
    every = answers(out, warm_up=True, finished=False)
    counted = next(at for at, answer in enumerate(every) if not answer.warm_up)
    warm_up = [answer.protocol for answer in every[:counted] if answer.finished]
    assert sorted(warm_up[-3:]) == ["ahead", "auto", "stream"]
    assert len(every[:counted]) > 3  # the first one was cut off


def test_the_time_off_is_in_no_outage(edge, out, prompts):
    """The edge is away when the watch stops, and the watch is off for a round."""
    clock = JumpingClock()
    port = free_port()
    settings = settings_of(f"tcp://127.0.0.1:{port}", out, prompts, rounds=0.02)
    watched(settings, clock)
    clock.ahead_s += EVERY_S
    longer = settings_of(settings.edge, out, prompts, rounds=1.03)
    watched(longer, clock)  # still away
    clock.ahead_s += EVERY_S
    with closing(Relay(edge.endpoint, port)):
        plan = watched(settings_of(settings.edge, out, prompts, rounds=4), clock)
    first, second = outages(out)
    assert first.ended_clock_s == pytest.approx(0.02 * EVERY_S, abs=3.0)
    assert second.began_clock_s == pytest.approx(1.02 * EVERY_S, abs=3.0)
    assert second.ended_clock_s == pytest.approx(1.03 * EVERY_S, abs=3.0)
    assert plan.outages == []
    assert numbers(out) == [2, 3]
    with Run.open(out) as run:
        starts = run.facts.starts
    for start, before in zip(starts[1:], (first, second), strict=True):
        assert start.off_s == pytest.approx(EVERY_S, abs=1.0)
        assert start.clock_s - start.off_s >= before.ended_clock_s
    link = read_run(out).history  # the report counts the time off neither as away nor as there
    assert [end - begin for begin, end in link.pauses] == pytest.approx([EVERY_S] * 2, abs=1.0)
    assert link.away_s == pytest.approx(sum(each.lasted_s for each in link.outages))
    assert link.away_s < 0.1 * EVERY_S


def test_a_kill_during_an_outage_costs_a_minute_of_it(out, prompts):
    """After a power cut the file has what was written until then, and no orderly end."""
    cut = out.with_name("cut")
    cut_s: list[float] = []

    class Cut(JumpingClock):
        def wait(self, seconds):
            super().wait(seconds)
            now_s = self.boot_s() - begun_s
            if now_s > 100.0 and not cut_s:
                cut_s.append(now_s)
                cut.mkdir()
                for part in out.parent.glob(out.name + "*"):
                    shutil.copy(part, cut)

    clock = Cut()
    settings = settings_of(f"tcp://127.0.0.1:{free_port()}", out, prompts, rounds=0.35)
    begun_s = clock.boot_s()
    watched(settings, clock)
    (open_still,) = outages(cut / out.name)
    assert open_still.ended_clock_s is None
    clock.ahead_s += 1e5
    after = settings_of(settings.edge, cut / out.name, prompts, rounds=2)
    open_watch(after, after.matrix, clock).recorder.close()
    (outage,) = outages(cut / out.name)
    assert cut_s[0] - 70.0 < outage.ended_clock_s <= cut_s[0]


def test_another_model_is_never_mixed_in(pair, out, prompts, tmp_path):
    """The edge comes back with another model, then with the first one again."""
    other = tiny_artifact(tmp_path / "other", vocab=64, seed=9, context=256)
    port = free_port()
    listen = ["--threads", 1, "--listen", f"tcp://127.0.0.1:{port}"]
    clock = JumpingClock()
    edges = [daemons.Daemon("--target", pair.target, *listen)]

    def serve(target):
        edges[-1].kill()
        edges.append(daemons.Daemon("--target", target, *listen))

    class Swapping(Plan):
        def on_outage(self, outage):
            super().on_outage(outage)
            if "another model" in outage.reason and outage.ended_clock_s is None:
                serve(pair.target)

    plan = Swapping({1: lambda: serve(other.path)})
    try:
        watched(settings_of(f"tcp://127.0.0.1:{port}", out, prompts, rounds=6), clock, plan)
    finally:
        edges[-1].kill()
    (outage,) = [each for each in outages(out) if "another model" in each.reason]
    assert "tiny (" in outage.reason
    assert outage.ended_clock_s is not None
    assert numbers(out)[-1] == 5
    for answer in answers(out):
        inside = outage.began_clock_s < answer.clock_s < outage.ended_clock_s
        assert not inside, "an answer of another model"


def test_a_protocol_that_the_edge_lacks_costs_its_answers_only(pair, edge, out, prompts):
    """An edge without a decision head cannot serve `wisv-full`."""
    with running("--target", pair.target, "--threads", 1) as plain:
        settings = settings_of(
            plain.endpoint, out, prompts, rounds=2, protocols=("stream", "adaptive"),
            draft=pair.draft,
        )  # fmt: skip
        plan = watched(settings, JumpingClock())
    assert numbers(out) == [0, 1]
    assert outages(out) == []
    assert [a.protocol for a in answers(out)] == ["stream", "stream"]
    assert all(set(each.failed) == {"adaptive"} for each in plan.rounds)
    failed = [a for a in answers(out, finished=False) if not a.finished]
    assert len(failed) == 2
    assert all(a.error for a in failed)
