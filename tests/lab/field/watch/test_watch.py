"""`pilotfish field watch` on a real edge: it goes on, whatever edge, link and clock do."""

from __future__ import annotations

import json
import os
import random
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
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_clock import on_wall_clock
from pilotfish.lab.field.token_speed import steady_token_s
from pilotfish.lab.field.watch.watch_file import open_watch
from pilotfish.lab.field.writable_run_file import has_begun
from tests.support.daemons import Systemd, free_port
from tests.support.measuring import answers, assert_whole, measure
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
