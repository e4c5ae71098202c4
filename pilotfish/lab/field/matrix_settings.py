"""The settings of a run's matrix: flags of `field measure`, and a fact of every run file."""

from typing import Annotated, Any

import msgspec

from pilotfish.base.settings import setting
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.lab.field.configuration import WindowSetting

_MOST_REPEATS = 10_000


class MatrixSettings(EngineSettings, frozen=True, kw_only=True):
    """The matrix of a run: protocols × windows × varied options × prompts × repeats.

    seed: seed of the answers and of the configurations' order. options: options of the request and
    of the protocols that have one value, without the temperature. link: options of the emulated
    link that have one value. varied: options with several values. If `link` is empty and no option
    of the link is varied, no link is emulated. provider, threads: provider and CPU threads of the
    drafter.
    """

    prompts: tuple[str, ...]
    protocols: Annotated[
        tuple[str, ...],
        setting("protocols to compare; auto chooses one for each answer", metavar="P,P,…"),
    ] = ("greedy", "coupled", "stream", "ahead", "auto")
    windows: Annotated[
        tuple[WindowSetting, ...],
        setting("number of draft tokens per round, or auto", metavar="N,N,…"),
    ] = (2, 4, 8)
    repeat: Annotated[
        int,
        setting(
            "number of answers to each prompt by each protocol and window", ge=1, le=_MOST_REPEATS
        ),
    ] = 4
    warm_up: Annotated[
        int,
        setting(
            "number of warm-up answers of each protocol and window at every start, which do "
            "not count",
            ge=0,
            le=_MOST_REPEATS,
        ),
    ] = 1
    max_tokens: Annotated[int, setting("maximum number of tokens of an answer", ge=1)] = 64
    temperature: float = 0.0
    seed: Annotated[int, setting("seed; repeat r uses seed N + r", ge=0)] = 0
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    link: dict[str, float] = msgspec.field(default_factory=dict)
    varied: dict[str, tuple[Any, ...]] = msgspec.field(default_factory=dict)
