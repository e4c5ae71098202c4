"""`pilotfish field watch` on a real edge: it goes on, whatever edge, link and clock do."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing

import pytest

from pilotfish.base.errors import ConfigError, RunFileError
from pilotfish.cli import main
from pilotfish.lab.field.recording import has_begun
from pilotfish.lab.field.report.measured import read_run
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_clock import on_wall_clock
from pilotfish.lab.field.token_speed import steady_token_s
from pilotfish.lab.field.watch.watch_file import open_watch
from tests.support import daemons
from tests.support.daemons import Systemd, free_port, running
from tests.support.measuring import answers, assert_whole, measure
from tests.support.relay import Relay
from tests.support.tiny import tiny_artifact
from tests.support.watching import (
    EVERY_S,
    JumpingClock,
    Plan,
    numbers,
    settings_of,
    started,
    watched,
)


def outages(out):
    with Run.open(out) as run:
        return list(run.outages())


# A watch that nothing disturbs


def test_each_round_has_a_probe_and_an_answer_by_each_protocol(edge, out, prompts):
    plan = watched(settings_of(edge.endpoint, out, prompts, rounds=4), JumpingClock())
    assert numbers(out) == [0, 1, 2, 3]
    result = answers(out)
    assert Counter((answer.repeat, answer.protocol) for answer in result) == {
        (number, protocol): 1 for number in range(4) for protocol in ("stream", "ahead", "auto")
    }
    assert [answer.prompt for answer in result[::3]] == [0, 1, 2, 0]
    orders = {tuple(a.protocol for a in result[at : at + 3]) for at in range(0, 12, 3)}
    assert len(orders) > 1
    for answer in result:
        assert_whole(answer)
        assert answer.clock_s // EVERY_S == answer.repeat
    assert sum(answer.warm_up for answer in answers(out, warm_up=True)) == 3
    with Run.open(out) as run:
        facts, probes = run.facts, list(run.probes())
    assert facts.watch.every_s == EVERY_S
    assert facts.target.name == "tiny"
    assert all(probe.rtts_s and 0 < probe.took_s < 10 for probe in probes)
    assert outages(out) == plan.outages == []
    assert [each.number for each in plan.rounds] == [0, 1, 2, 3]
    speeds = [steady_token_s(answer) for each in plan.rounds for answer in each.answers]
    assert speeds == [steady_token_s(answer) for answer in result]
    assert None not in speeds


def test_rows_are_told_without_a_round(out, prompts):
    plan = watched(
        settings_of(f"tcp://127.0.0.1:{free_port()}", out, prompts, for_s=1.0), JumpingClock()
    )
    assert plan.rounds == []
    assert plan.written == [len(outages(out))] == [1]


def test_the_same_command_continues_the_watch(edge, out, prompts):
    clock = JumpingClock()
    settings = settings_of(edge.endpoint, out, prompts, rounds=6)
    plan = Plan()
    watching = started(settings, clock, plan)
    plan.acts[1] = watching.stop
    watching.run()
    assert numbers(out) == [0, 1]
    clock.ahead_s += 1.9 * EVERY_S  # it is off meanwhile
    watched(settings, clock)
    assert numbers(out) == [0, 1, 3, 4, 5]
    with Run.open(out) as run:
        assert [round(start.clock_s / EVERY_S, 1) for start in run.facts.starts] == [0.0, 2.9]
    watched(settings, clock)  # it is over
    assert numbers(out) == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"every_s": 60.0}, "--every 300.0, not 60.0"),
        ({"protocols": ("stream",)}, "--protocols stream,ahead,auto, not stream"),
        ({"edge": "tcp://127.0.0.1:1"}, "--edge"),
        ({"max_tokens": 7}, "--max-tokens 6, not 7"),
        ({"prompts": None}, "other prompts"),
    ],
)
def test_a_file_of_another_watch_is_refused(out, prompts, changes, words):
    clock = JumpingClock()
    settings = settings_of("tcp://127.0.0.1:7077", out, prompts)
    open_watch(settings, settings.matrix, clock).recorder.close()
    before = out.read_bytes()
    other = settings_of(**{"edge": settings.edge, "out": out, "prompts": prompts, **changes})
    with pytest.raises(ConfigError, match=words):
        open_watch(other, other.matrix, clock)
    assert out.read_bytes() == before
    longer = settings_of(settings.edge, out, prompts, rounds=9, keep_s=1e6, name="b")
    with closing(open_watch(longer, longer.matrix, clock).recorder):
        pass
    with Run.open(out) as run:
        assert (run.facts.watch.for_s, run.facts.device) == (9 * EVERY_S, "b")


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"every_s": 0.0}, "--every"),
        ({"keep_s": 1.0}, "--keep"),
        ({"every_s": 40 * 86400.0}, r"--keep \(31d unless given\)"),
        ({"most_bytes": 1}, "--most-b"),
    ],
)
def test_bounds_that_keep_nothing_are_refused(out, prompts, bounds, words):
    with pytest.raises(ConfigError, match=words):
        settings_of("tcp://127.0.0.1:7077", out, prompts, **bounds)


def test_a_file_that_another_watch_writes_is_refused(out, prompts):
    """It may end, so systemd tries again: the exit code is not that of the configuration."""
    settings = settings_of("tcp://127.0.0.1:7077", out, prompts)
    with (
        closing(open_watch(settings, settings.matrix, JumpingClock()).recorder),
        pytest.raises(RunFileError, match="is writing"),
    ):
        open_watch(settings, settings.matrix, JumpingClock())


def test_a_run_of_measure_is_refused(pair, edge, out, prompts):
    more = ["--prompts", prompts, "--protocols", "stream", "--repeat", 1, "--max-tokens", 4]
    assert measure(pair, edge.endpoint, out, *more) == 0
    settings = settings_of(edge.endpoint, out, prompts)
    with pytest.raises(ConfigError, match="field measure"):
        open_watch(settings, settings.matrix, JumpingClock())


# Clocks


def test_a_clock_that_is_set_moves_no_round(edge, out, prompts):
    clock = JumpingClock()

    def set_by(seconds):
        clock.wall_s += seconds

    plan = Plan({2: lambda: set_by(86400.0), 4: lambda: set_by(-90000.0)})
    watched(settings_of(edge.endpoint, out, prompts, rounds=8), clock, plan)
    assert numbers(out) == list(range(8))
    assert [round(step) for step in plan.steps] == [86400, -90000]
    with Run.open(out) as run:
        probes = list(run.probes())
    times = on_wall_clock([p.clock_s for p in probes], [p.began_unix_s for p in probes])
    assert [round(step.by_s) for step in times.steps] == [86400, -90000]


def test_a_machine_that_sleeps_skips_rounds(edge, out, prompts):
    clock = JumpingClock()

    def sleep():
        clock.ahead_s += 3.2 * EVERY_S

    watched(settings_of(edge.endpoint, out, prompts, rounds=7), clock, Plan({1: sleep}))
    assert numbers(out) == [0, 1, 4, 5, 6]
    assert outages(out) == []


# The edge


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
    """A refused key, or a name that nobody knows: the watch waits until it is mended."""
    settings = settings_of(
        address or locked_edge.endpoint, out, prompts, rounds=0.02, keys=key_folders[name]
    )
    watched(settings, JumpingClock())
    (outage,) = outages(out)
    assert words in outage.reason
    assert outage.ended_clock_s is None
    assert not numbers(out)


class Breaking(Relay):
    """Breaks for ever once it has brought so many bytes from the edge; at_s: when it did."""

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


# The command


def watch_command(endpoint, out, prompts, *more):
    flags = ["--edge", endpoint, "--out", out, "--prompts", prompts, "--max-tokens", 6, *more]
    return ["field", "watch", *map(str, flags)]


def test_faults_of_the_configuration_end_the_command(out, prompts, tmp_path, capsys):
    config = tmp_path / "watch.toml"
    config.write_text('edge = "tcp://127.0.0.1:7077"\nevry = "5min"\n')
    assert main(["field", "watch", "--config", str(config), "--out", str(out)]) == 78
    assert "evry" in capsys.readouterr().err
    config.write_text('edge = "tcp://127.0.0.1:7077"\nevery = "5 parsecs"\n')
    assert main(["field", "watch", "--config", str(config), "--out", str(out)]) == 78
    assert main(watch_command("tcp://192.0.2.1:7077", out, prompts)) == 64
    assert "--keys" in capsys.readouterr().err
    missing = ["--draft", tmp_path / "no-model"]
    assert main(watch_command("tcp://127.0.0.1:7077", out, prompts, *missing)) == 66
    assert not has_begun(out)
    nowhere = tmp_path / "missing" / "day.pilotfish"
    assert main(watch_command("tcp://127.0.0.1:7077", nowhere, prompts)) == 74


def test_ctrl_c_ends_it_and_says_where_the_file_is(edge, out, prompts, capsys):
    def interrupt():
        while not has_begun(out) or not numbers(out):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert main(watch_command(edge.endpoint, out, prompts, "--every", "1h")) == 130
    text = capsys.readouterr().err
    assert f"pilotfish field report {out}" in text
    assert "RTT" in text
    assert not out.with_name(out.name + "-wal").exists()


def test_killed_at_any_moment_it_loses_the_running_row_alone(edge, out, prompts):
    """SIGKILL again and again: each row that was on the disk stays, once and whole."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "tests.support.killable", str(write)]
    rng = random.Random(5)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[write], text=True
    ) as parent:
        os.close(write)
        assert parent.stdin is not None
        assert parent.stdout is not None
        before: list[int] = []
        for _ in range(12):
            words = watch_command(edge.endpoint, out, prompts, "--every", "0.2s")
            parent.stdin.write(json.dumps(words) + "\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            deadline_s = time.monotonic() + 20
            while not (has_begun(out) and len(numbers(out)) > len(before)):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.3))
            os.kill(child, signal.SIGKILL)
            parent.stdout.readline()
            now = numbers(out)
            assert now[: len(before)] == before
            assert len(now) == len(set(now))
            before = now
        parent.stdin.close()
    os.set_blocking(read, False)
    witnessed = {int(line.split()[0]) for line in os.read(read, 1 << 24).split(b"\n") if line}
    os.close(read)
    every = answers(out, warm_up=True, finished=False)
    for answer in every:
        if answer.finished:
            assert_whole(answer)
    assert [answer.id for answer in every] == list(range(1, len(every) + 1))
    assert len(every) >= max(witnessed) - 1
    with Run.open(out) as run:
        assert len(run.facts.starts) == 12


def test_systemd_hears_of_it(edge, out, prompts, tmp_path):
    systemd = Systemd(tmp_path)
    environment = os.environ | {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "400000000"}
    command = [sys.executable, "-m", "pilotfish"]
    command += watch_command(edge.endpoint, out, prompts, "--every", "1h")
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as watch:
        systemd.await_("READY", "1")
        systemd.await_("WATCHDOG", "1")
        while not numbers(out):
            time.sleep(0.02)
        watch.send_signal(signal.SIGTERM)
        systemd.await_("STOPPING", "1")
        assert watch.wait(30) == 0
    assert "Watching tcp://" in systemd.await_("STATUS", "Watching")
