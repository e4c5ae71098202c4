"""Rows of a run, and files of older formats, for what reads or writes run files."""

from __future__ import annotations

import json
import sqlite3
import time

from pilotfish.device_runtime.record import STAGES, Choice, Forecast, Round, Timings
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_facts import Facts, Model, Start
from pilotfish.wire.link.state import LinkState, Reading

FACTS = Facts(
    software="pilotfish 0",
    settings=MatrixSettings(prompts=("Why?", "How?"), windows=(2, "auto")),
    starts=(Start(unix_s=1.5, host={"board": "Jetson", "cpus": 8}),),
    drafter=Model("small", "int4", "0123456789abcdef"),
    target=Model("large"),
    edge="tcp://127.0.0.1:7077",
    edge_software="pilotfish 0",
    draft_path="/models/small",
    keys_path=None,
    note="by the window",
    energy=None,
)
LINK = LinkState(rtt=Reading(value=0.02, age_s=0.5, samples=3))
CHOICE = Choice(
    policy="predictive",
    protocol="greedy",
    window=4,
    token_s=0.01,
    reason="cheapest",
    forecasts=[Forecast("greedy", 4, 0.01), Forecast("stream", 0, 0.02)],
)


def requests(prompt=0, repeat=0, *, protocol="greedy", window=4, warm_up=False):
    return Answer(
        id=0,
        protocol=protocol,
        window=window,
        prompt=prompt,
        repeat=repeat,
        warm_up=warm_up,
        temperature=0.0,
        seed=7,
        started_unix_s=time.time(),
        finished=False,
    )


def a_round(number=0, protocol="greedy"):
    timings = Timings(**{stage: 0.001 * i for i, stage in enumerate(STAGES)})
    return Round(
        protocol=protocol,
        start=10 + 3 * number,
        window=4,
        nodes=4,
        accepted=2,
        tokens=[1, 2, number],
        uplink_bytes=40,
        downlink_bytes=58,
        timings=timings,
    )


def read(path, **kind):
    with Run.open(path) as run:
        return list(run.answers(**kind))


# the columns of rounds that older formats do not have
LATER = {
    1: ("forgiven", "inquired", "deviation", "notes"),
    2: ("deviation", "notes"),
    3: ("notes",),
    4: (),
    5: (),
}


def as_format(version, path):
    """The file as Pilotfish wrote it before it knew decision heads, or relaxations."""
    with sqlite3.connect(path) as database:
        for column in LATER[version]:
            database.execute(f"ALTER TABLE rounds DROP COLUMN {column}")
        database.executescript(
            "DROP TABLE rtts; DROP TABLE probes; DROP TABLE outages;"
            f"ALTER TABLE answers DROP COLUMN clock_s; PRAGMA user_version = {version};"
        )
        if version == 5:
            return
        database.executescript(
            "DROP INDEX measured_once; ALTER TABLE answers DROP COLUMN point;"
            "CREATE UNIQUE INDEX measured_once ON answers (protocol, ifnull(window, ''), prompt, "
            "repeat) WHERE finished AND NOT warm_up;"
        )
        (settings,) = database.execute("SELECT value FROM facts WHERE name = 'settings'").fetchone()
        flat = json.loads(settings)
        flat |= flat.pop("options")
        del flat["link"], flat["varied"]
        database.execute("UPDATE facts SET value = ? WHERE name = 'settings'", (json.dumps(flat),))


PROBE = Probe(
    began_unix_s=1.8e9,
    clock_s=300.0,
    took_s=1.5,
    rtts_s=[0.02, 0.021],
    lost=1,
    up_bps=4e6,
    up_bound=True,
    down_bps=2e7,
    uplink_bytes=300_000,
    downlink_bytes=900_000,
    link=LINK,
    signal={"source": "ModemManager", "rsrp_dbm": -97.5},
    position={"lat": 52.5, "lon": 13.4},
    power_w=7.5,
)
OUTAGE = Outage(began_unix_s=1.8e9, began_clock_s=310.0, reason="no route")
