"""How large the file of a watch becomes in a month, and that its bounds hold.

    python benchmarks/watch_month.py [--json PATH] [--quick]

Writes the rows of a watch by the product's writer: every five minutes a probe of ten pings and four
answers of 16 tokens (stream: a round a token; three protocols with eight rounds), for two months.
The rows are made up, of the size of real ones; nothing is measured. Two files: one without bounds,
one that keeps 31 days and at most 20 MB.

Goals: a month takes at most 100 MB; the bounds hold at each round; a round's rows are written in
the median in at most 50 ms at the end.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

from _common import Goal, Rows, at_most, conclude, options

from pilotfish.device_runtime.record import Choice, Forecast, Round, RttSample, Timings
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run import Answer, Facts, MatrixSettings, Model, Start, Watch
from pilotfish.lab.field.watch.retention import forget_old
from pilotfish.wire.link.state import LinkState, Reading

EVERY_S, DAY_S = 300.0, 86400.0
MOST_BYTES = 20_000_000
PROTOCOLS = ("stream", "ahead", "greedy", "auto")
BEGAN_UNIX_S = 1_800_000_000.0
LINK = LinkState(
    rtt=Reading(value=0.0482713, age_s=0.0123, samples=5),
    jitter=Reading(value=0.0031415, age_s=0.0123, samples=16),
    up=Reading(value=4.31e6, age_s=4.2, samples=1),
    down=Reading(value=2.27e7, age_s=4.2, samples=1),
    signal=Reading(value=-71.0, age_s=0.0, samples=1),
)
CHOICE = Choice(
    policy="predictive",
    protocol="ahead",
    window=0,
    token_s=0.0312345,
    reason="ahead is predicted to take 31.2 ms a token, stream 40.1",
    forecasts=[Forecast(name, 4, 0.0312345, 0.0123) for name in PROTOCOLS * 3],
)


def write_round(recorder: Recorder, number: int) -> None:
    """Write what a watch writes in one round."""
    clock_s = number * EVERY_S
    unix_s = BEGAN_UNIX_S + clock_s
    recorder.add_probe(
        Probe(
            began_unix_s=unix_s,
            clock_s=clock_s,
            took_s=3.2123456,
            rtts_s=[0.0482713 + 1e-4 * at for at in range(10)],
            up_bps=4.31e6,
            down_bps=2.27e7,
            uplink_bytes=1_123_456,
            downlink_bytes=2_123_456,
            link=LINK,
            signal={"source": "ModemManager", "technology": "lte", "rsrp_dbm": -97.0},
            position={"lat": 52.5200066, "lon": 13.404954, "error_m": 4.2},
            power_w=7.512,
        )
    )
    if number % 50 == 0:
        outage = recorder.begin_outage(
            Outage(began_unix_s=unix_s, began_clock_s=clock_s, reason="No answer for 2 s.")
        )
        recorder.end_outage(outage, unix_s + 60, clock_s + 60)
    for protocol in PROTOCOLS:
        write_answer(recorder, number, protocol, clock_s)


def write_answer(recorder: Recorder, number: int, protocol: str, clock_s: float) -> None:
    answer = Answer(
        id=0,
        protocol=protocol,
        window="auto",
        prompt=number % 5,
        repeat=number,
        warm_up=False,
        temperature=0.0,
        seed=number,
        started_unix_s=BEGAN_UNIX_S + clock_s,
        clock_s=clock_s,
        finished=False,
    )
    with recorder.together():
        row = recorder.begin(answer)
        rounds = 16 if protocol == "stream" else 8
        for at in range(rounds):
            round_ = Round(
                protocol=protocol,
                start=30 + at,
                window=4,
                accepted=1,
                tokens=[12345] * (16 // rounds),
                nodes=4,
                uplink_bytes=87,
                downlink_bytes=112,
                timings=Timings(draft=0.0101234, uplink=0.0201234, verify=0.0301234),
            )
            recorder.add_round(row, at, 0.0512345 * at, round_)
        recorder.add_rtts(row, [RttSample(0.0512345 * at, 0.0482713) for at in range(8)])
        recorder.end(
            row,
            finished=True,
            protocol_used="ahead" if protocol == "auto" else protocol,
            prompt_tokens=30,
            tokens=16,
            finish_reason="length",
            first_token_s=0.1234567,
            total_s=0.9876543,
            link=LINK,
            choice=CHOICE if protocol == "auto" else None,
            pings=2,
        )


def write(path: Path, watch: Watch, rounds: int) -> tuple[int, int, float]:
    """Return the largest bytes of file and log, the bytes at the end, and ms of the last rounds."""
    facts = Facts(
        software="pilotfish",
        settings=MatrixSettings(prompts=("Why is the sky blue?",), protocols=PROTOCOLS),
        starts=(Start(unix_s=BEGAN_UNIX_S, host={}),),
        drafter=Model("text"),
        target=Model("made up"),
        edge="tcp://127.0.0.1:7077",
        edge_software="pilotfish",
        draft_path="text",
        keys_path=None,
        note="made up",
        energy=None,
        watch=watch,
    )
    largest, took_ms = 0, []
    with Recorder.create(path, facts) as recorder:
        for number in range(rounds):
            began_s = time.monotonic()
            write_round(recorder, number)
            forget_old(recorder, watch, number * EVERY_S)
            took_ms.append((time.monotonic() - began_s) * 1e3)
            sizes = [each.stat().st_size for each in path.parent.glob(f"{path.name}*")]
            largest = max(largest, sum(sizes))
    return largest, path.stat().st_size, median(took_ms[-500:])


def main() -> int:
    args = options(__doc__).parse_args()
    day = int(DAY_S / EVERY_S)
    days = 6 if args.quick else 62
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, watch, length in (
            ("without bounds", Watch(every_s=EVERY_S), days // 2 * day),
            (
                "31 days, 20 MB",
                Watch(every_s=EVERY_S, keep_s=days // 2 * DAY_S, most_bytes=MOST_BYTES),
                days * day,
            ),
        ):
            largest, end, ms = write(Path(folder) / f"{len(rows)}.pilotfish", watch, length)
            rows.append(
                {
                    "file": name,
                    "days": length / day,
                    "largest_mb": largest / 1e6,
                    "end_mb": end / 1e6,
                    "ms_a_round": ms,
                }
            )
    goals: list[Goal] = [
        at_most("MB of a month without bounds", rows[0]["end_mb"], 100.0),
        at_most("largest MB with a bound of 20 MB", rows[1]["largest_mb"], MOST_BYTES / 1e6),
        at_most("ms to write a round at the end", rows[0]["ms_a_round"], 50.0),
    ]
    columns = ("file", "days", "largest_mb", "end_mb", "ms_a_round")
    return conclude(args, "a month of a watch", columns, rows, goals)


if __name__ == "__main__":
    raise SystemExit(main())
