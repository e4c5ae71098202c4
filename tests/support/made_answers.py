"""Rounds, answers and run files made by hand, for what reads run files."""

from __future__ import annotations

from pilotfish.device_runtime.record import Choice, Forecast, Round, Timings
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run_facts import Facts, Model, Start
from pilotfish.wire.link.state import LinkState, Reading


def chain(window, accepted, *, ms=10.0, protocol="greedy", up=50, down=60, **judged):
    """A round whose stages take ms in all."""
    timings = Timings(draft=ms * 0.4e-3, verify=ms * 0.5e-3, uplink=ms * 0.1e-3)
    return Round(
        protocol=protocol,
        start=0,
        window=window,
        nodes=window,
        accepted=accepted,
        tokens=[7] * (accepted + 1),
        uplink_bytes=up,
        downlink_bytes=down,
        timings=timings,
        **judged,
    )


def stream(*seconds):
    """Messages of a stream, each of two tokens after so long; the first one reads the prompt."""
    return [
        Round(
            protocol="stream",
            start=2 * number,
            window=0,
            accepted=0,
            tokens=[1, 2],
            timings=Timings(verify=took_s),
        )
        for number, took_s in enumerate(seconds)
    ]


def answer(rounds, *, protocol="greedy", window=4, **more):
    """A finished answer of these rounds."""
    total_s = sum(r.timings.total for r in rounds)
    values = {
        "id": 1,
        "protocol": protocol,
        "window": window,
        "prompt": 0,
        "repeat": 0,
        "warm_up": False,
        "temperature": 0.0,
        "seed": 0,
        "started_unix_s": 1.8e9,
        "finished": True,
        "tokens": sum(len(r.tokens) for r in rounds),
        "total_s": total_s,
        "first_token_s": rounds[0].timings.total,
        "rounds": rounds,
    }
    return Answer(**{**values, **more})


def facts(**more):
    """Of a run on a machine that tells little."""
    values = {
        "software": "pilotfish 0.0.0",
        "settings": MatrixSettings(prompts=("a",)),
        "starts": (Start(unix_s=1.8e9, host={"board": "a board", "memory_bytes": 2**31}),),
        "drafter": Model(name="small"),
        "target": Model(name="large"),
        "edge": "tcp://127.0.0.1:7077",
        "edge_software": "pilotfish 0.0.0",
        "draft_path": "drafter",
        "keys_path": None,
        "note": "",
        "energy": None,
    }
    return Facts(**{**values, **more})


def recorded(path, answers, **more):
    """A run file with these answers, by the store's own writer."""
    with Recorder.create(path, facts(**more)) as recorder:
        for item in answers:
            number = recorder.begin(item)
            for i, round_ in enumerate(item.rounds):
                recorder.add_round(number, i, 0.1 * i, round_)
            if item.finished:
                names = ("finished", "tokens", "total_s", "first_token_s", "energy_j")
                ends = {name: getattr(item, name) for name in names}
                recorder.end(number, **ends, link=item.link, choice=item.choice)
    return path


def linked(**readings):
    """A link state with these values."""
    return LinkState(**{k: Reading(value=v, age_s=0.0, samples=1) for k, v in readings.items()})


def chosen(protocol, window, token_s, forecasts, reason="cheapest"):
    return Choice(
        policy="predictive",
        protocol=protocol,
        window=window,
        token_s=token_s,
        reason=reason,
        forecasts=[Forecast(*each) for each in forecasts],
    )
