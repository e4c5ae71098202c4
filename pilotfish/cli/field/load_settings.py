"""Settings of ``pilotfish field load``."""

import re
from pathlib import Path
from typing import Annotated

from pilotfish.base.settings import setting
from pilotfish.cli.quantities import duration
from pilotfish.emulation.emulator import Conditions
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.lab.field.measure import EdgeKeys
from pilotfish.lab.prompts import prompts_setting
from pilotfish.lab.statistics import FEWEST_VALUES

_COUNTS = (1, 2, 4, 8, 16)
_MOST_DEVICES = 1000  # a thread each
_DAY_S = 86400.0
_METHODS = ("stream", "greedy:4", "ahead")


def _counts(text: str) -> tuple[int, ...]:
    """Parse ``1,2,4`` as numbers of devices."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", part) and int(part) for part in parts):
        raise ValueError(f"{text} is not a list of numbers of devices, such as 1,2,4")
    counts = sorted({int(part) for part in parts})
    if counts[-1] > _MOST_DEVICES:
        raise ValueError(
            f"{counts[-1]} devices are too many: one machine can be at most {_MOST_DEVICES}"
        )
    return tuple(counts)


def _time(text: str) -> float:
    """Parse a time of at most a day."""
    seconds = duration(text)
    if seconds > _DAY_S:
        raise ValueError(f"{text} is longer than a day")
    return seconds


def _limit(text: str) -> float:
    """Parse a time above 0."""
    seconds = _time(text)
    if not seconds:
        raise ValueError("no answer takes no time; give a time above 0")
    return seconds


class LoadSettings(EngineSettings, frozen=True, kw_only=True):
    """Settings of ``pilotfish field load``."""

    out: Annotated[
        Path,
        setting("the folder for the answers, the drafts, load.json and load.png", metavar="DIR"),
    ]
    resume: Annotated[bool, setting("continue with the record and the points in --out")] = False
    edge: (
        Annotated[str, setting("the edge's address, tcp://HOST:PORT", metavar="ADDRESS")] | None
    ) = None
    service: Annotated[
        tuple[str, ...],
        setting(
            "in place of --edge: addresses of running `device serve`, http://HOST:PORT,…, over "
            "which the devices are spread; each service needs a lane for each of its devices",
            metavar="URL,URL,…",
        ),
    ] = ()
    keys: EdgeKeys | None = None
    draft: (
        Annotated[
            Path,
            setting(
                "the drafter whose drafts are recorded; not needed for stream and ahead:edge; "
                "with --resume, the drafts in --out count",
                metavar="MODEL",
            ),
        ]
        | None
    ) = None
    draft_ms: (
        Annotated[
            float,
            setting(
                "milliseconds of a draft on the devices (default: as measured here)",
                ge=0,
                le=60_000,
                metavar="T",
            ),
        ]
        | None
    ) = None
    prompts: (
        Annotated[
            Path,
            prompts_setting("'prompt', 'question' or 'messages'", "; use prompts of your users"),
        ]
        | None
    ) = None
    max_tokens: Annotated[int, setting("maximum number of tokens of an answer", ge=1)] = 128
    protocols: Annotated[
        tuple[str, ...],
        setting(
            "methods to answer: stream; a protocol of rounds with its window, such as greedy:4; "
            "ahead, or ahead:edge for hints of the edge alone; auto",
            metavar="METHOD,METHOD,…",
        ),
    ] = _METHODS
    devices: Annotated[
        tuple[int, ...],
        setting("numbers of devices to try", form=_counts, metavar="N,N,…"),
    ] = _COUNTS
    processes: (
        Annotated[
            int,
            setting(
                "processes of devices (default: one for each CPU that may be used)", ge=1, le=256
            ),
        ]
        | None
    ) = None
    think_s: Annotated[
        float,
        setting(
            "mean time that a user thinks after an answer, exponentially distributed (default: 5s)",
            form=_time,
            metavar="TIME",
        ),
    ] = 5.0
    rate: (
        Annotated[
            float,
            setting(
                "in place of --think: questions per minute of each device, at Poisson's times, "
                "also while it answers",
                ge=0.01,
                le=60_000,
                metavar="R",
            ),
        ]
        | None
    ) = None
    arrivals_seed: Annotated[int, setting("seed of the times and the order of prompts", ge=0)] = 0
    for_s: Annotated[
        float,
        setting(
            "shortest time of a point, after its warm-up (default: 30s)",
            form=_time,
            metavar="TIME",
        ),
    ] = 30.0
    warm_up_s: Annotated[
        float,
        setting(
            "time before a point that does not count (default: 5s)",
            form=_time,
            metavar="TIME",
        ),
    ] = 5.0
    answers: Annotated[
        int, setting("a point goes on until this many of its answers have ended", ge=1)
    ] = FEWEST_VALUES
    at_s: Annotated[
        float,
        setting(
            "the limit: 9 of 10 answers take at most this time per token (default: 100ms)",
            form=_limit,
            metavar="TIME",
        ),
    ] = 0.1
    link: Annotated[
        Conditions,
        setting("one link that all devices share, in front of the edge", title="emulated link"),
    ] = Conditions()
