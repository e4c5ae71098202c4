"""Run files of watches made by hand: a link with a daily rhythm, an outage, restarts, set clocks.

    python -m tests.support.made_watches OUT.pilotfish [--days 1] [--seed 0] [--device NAME]

writes one for looking at its report.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np

from pilotfish.device_runtime.record import RttSample
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run_facts import Start, Watch
from tests.support.made_answers import answer, chain, chosen, facts, linked

BEGAN_UNIX_S = 1_796_000_000.0  # a Monday at about nine
EVERY_S = 300.0
PROTOCOLS = ("stream", "ahead", "auto")
MEMORY = Path("/dev/shm")


def rtts_s(clock_s, rng, count, slow=1.0):
    """RTT samples of a cellular link: slower in the evening, with a long tail."""
    hour = (9.0 + clock_s / 3600.0) % 24.0
    usual = 0.045 + 0.03 * np.exp(-((hour - 20.0) ** 2) / 8.0)
    tail = rng.pareto(2.2, count) * 0.012
    return [float(rtt) for rtt in slow * (usual + rng.gamma(2.0, 0.004, count) + tail)]


def probe(clock_s, rng, step_s=0.0, *, slow=1.0, radio=True, energy=True):
    """A probe at this time of the run's clock; its goodput may be a bound."""
    up, down = rng.lognormal(2.2, 0.4), rng.lognormal(3.3, 0.35)
    return Probe(
        began_unix_s=BEGAN_UNIX_S + clock_s + step_s,
        clock_s=clock_s,
        took_s=4.0,
        rtts_s=rtts_s(clock_s, rng, 10, slow),
        lost=int(rng.random() < 0.03),
        up_bps=up * 1e6,
        up_bound=bool(up > 11),
        down_bps=down * 1e6,
        down_bound=bool(down > 40),
        uplink_bytes=400_000,
        downlink_bytes=900_000,
        signal={"source": "modem", "dbm": float(-85 + 8 * rng.standard_normal())}
        if radio
        else None,
        power_w=4.2 if energy else None,
    )


def answers(round_number, clock_s, rng, step_s=0.0, *, slow=1.0, energy=True):
    """The answers of one round, one by each protocol."""
    made = []
    for at, protocol in enumerate(PROTOCOLS):
        at_s = clock_s + 6.0 + 4.0 * at
        samples = rtts_s(at_s, rng, 1 if protocol == "stream" else 5, slow)
        used = protocol if protocol != "auto" else ("ahead" if rng.random() < 0.71 else "stream")
        ms = {"stream": 62.0, "ahead": 34.0}[used] * rng.lognormal(0.0, 0.25) * slow**0.5
        if used == "stream":
            rounds = [chain(0, 0, ms=1e3 * samples[0] + 180.0, protocol="stream", up=30)]
            rounds += [chain(0, 0, ms=ms, protocol="stream", up=0) for _ in range(15)]
        else:
            rounds = [chain(6, 2, ms=1e3 * samples[0] + 200.0, protocol="ahead", up=70)]
            for _ in range(4):
                accepted = int(rng.integers(0, 6))
                rounds.append(chain(6, accepted, ms=ms * (accepted + 1), protocol="ahead", up=70))
        plans = [("ahead", 6, 0.036, 0.036), ("stream", 0, 0.06, 0.06)]
        made.append(
            answer(
                rounds,
                protocol=protocol,
                window=None,
                repeat=round_number,
                started_unix_s=BEGAN_UNIX_S + at_s + step_s,
                clock_s=at_s,
                rtts=[RttSample(0.2 * i, rtt) for i, rtt in enumerate(samples)],
                link=linked(rtt=samples[0], jitter=0.004, retransmitted=0.004 * rng.random()),
                choice=chosen(used, 6 if used == "ahead" else 0, 0.036, plans)
                if protocol == "auto"
                else None,
                energy_j=0.12 * sum(len(r.tokens) for r in rounds) if energy else None,
            )
        )
    return made


def recorded_watch(path, rounds, *, seed=0, device="jetson-north", away=(), off=(), steps=(),
                   every_s=EVERY_S, open_outage=False, **kinds):  # fmt: skip
    """Write a run file of a watch of so many slots.

    away: slots in which an outage begins and ends. off: slots in which the watch does not run, from
    and to. steps: (slot, seconds) of settings of the wall clock, which add up.
    """
    rng = np.random.default_rng(seed)
    memory = tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None)
    made = Path(memory) / path.name
    watch = Watch(every_s=every_s, for_s=rounds * every_s)
    known = facts(
        device=device,
        watch=watch,
        settings=MatrixSettings(prompts=("a",), protocols=PROTOCOLS),
        starts=(Start(unix_s=BEGAN_UNIX_S, host={"board": "a board"}),),
    )
    with Recorder.create(made, known) as recorder:
        for begin, end in away:
            first, last = begin * every_s + 20.0, end * every_s - 3.0
            ends = {}
            if not (open_outage and (begin, end) == away[-1]):
                ends = {"ended_unix_s": BEGAN_UNIX_S + last, "ended_clock_s": last}
            recorder.add_outage(
                Outage(began_unix_s=BEGAN_UNIX_S + first, began_clock_s=first,
                       reason="The edge did not answer within 2 s.", **ends)
            )  # fmt: skip
        for slot in range(rounds):
            step_s = sum(by for at, by in steps if slot >= at)
            if any(begin < slot < end for begin, end in [*away, *off]):
                continue
            recorder.add_probe(probe(slot * every_s, rng, step_s, **kinds))
            energy = {name: value for name, value in kinds.items() if name != "radio"}
            for item in answers(slot, slot * every_s, rng, step_s, **energy):
                record(recorder, item)
    shutil.move(made, path)
    shutil.rmtree(memory)
    return path


def record(recorder, item):
    """Write an answer, with its RTT samples."""
    number = recorder.begin(item)
    for i, round_ in enumerate(item.rounds):
        recorder.add_round(number, i, 0.1 * i, round_)
    recorder.add_rtts(number, item.rtts)
    names = ("finished", "tokens", "total_s", "first_token_s", "energy_j", "link", "choice")
    recorder.end(number, **{name: getattr(item, name) for name in names})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--days", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="jetson-north")
    parser.add_argument("--slow", type=float, default=1.0)
    options = parser.parse_args()
    slots = round(options.days * 288)
    recorded_watch(options.out, slots, seed=options.seed, device=options.device, slow=options.slow,
                   away=[(100, 112)], off=[(200, 206)], steps=[(60, 3600.0), (64, -3600.0)],
                   )  # fmt: skip
