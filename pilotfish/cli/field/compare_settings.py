"""Settings of ``pilotfish field compare``."""

from pathlib import Path
from typing import Annotated

from pilotfish.base.settings import setting
from pilotfish.cli.quantities import duration
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.lab.field.measure import EdgeKeys
from pilotfish.lab.prompts import prompts_setting

_RTTS_S = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)


def _rtts(text: str) -> tuple[float, ...]:
    """Parse ``0,5ms,20ms`` as seconds."""
    return tuple(sorted({duration(part) for part in text.split(",")}))


class CompareSettings(EngineSettings, frozen=True, kw_only=True):
    """Settings of ``pilotfish field compare``."""

    drafters: Annotated[
        tuple[str, ...],
        setting(
            "drafters, named as for `device run`: artifacts, models that are exported into the "
            "cache on first use; or text: drafts by repetitions of the text, without a model",
            metavar="DRAFTER",
            positional=True,
        ),
    ] = ()
    target: Annotated[
        str,
        setting(
            "the target, as for `edge serve`, which this command then serves; or the address of "
            "a running edge, tcp://HOST:PORT",
            metavar="MODEL|ADDRESS",
        ),
    ]
    keys: EdgeKeys | None = None
    prompts: (
        Annotated[
            Path,
            prompts_setting(
                "'prompt', 'question' or 'messages'",
                "; use 30 or more to tell apart drafters that are nearly equal",
            ),
        ]
        | None
    ) = None
    max_tokens: Annotated[int, setting("maximum number of tokens of an answer", ge=1)] = 128
    temperature: Annotated[
        float,
        setting(
            "sampling temperature; 0 is greedy; above 0, both ends sample with the same noise, "
            "as in protocol coupled",
            ge=0,
            metavar="T",
        ),
    ] = 0.0
    seed: Annotated[int, setting("prompt p is sampled with seed N + p", ge=0)] = 0
    target_ms: (
        Annotated[
            float,
            setting(
                "duration of a target's pass on its future machine, in milliseconds, for any "
                "number of tokens (default: the durations that the edge reported, scaled to "
                "the pace of its answers)",
                gt=0,
                metavar="T",
            ),
        ]
        | None
    ) = None
    rtts_s: Annotated[
        tuple[float, ...],
        setting(
            "round trip times to compare at (default: 0,5ms,10ms,20ms,50ms,100ms,200ms)",
            form=_rtts,
            metavar="TIME,TIME,…",
            flag="rtt",
        ),
    ] = _RTTS_S
    out: (
        Annotated[
            Path,
            setting(
                "write the answers, the measured values and a picture into this folder",
                metavar="DIR",
            ),
        ]
        | None
    ) = None
    resume: Annotated[bool, setting("continue with the answers in --out")] = False
