"""The settings of `pilotfish field watch`: flags, or keys of a TOML file."""

from pathlib import Path
from typing import Annotated

from pilotfish.base.errors import ConfigError
from pilotfish.base.settings import setting
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.edge_runtime.metrics_server import MetricsAddress, MetricsHosts
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.field.measure import EdgeKeys
from pilotfish.lab.field.run_facts import Watch
from pilotfish.lab.field.watch.probe import ProbeSettings
from pilotfish.lab.field.watch.schedule import Schedule
from pilotfish.lab.prompts import BUILT_IN, prompts_setting, read_prompts

_LEAST_EVERY_S = 0.1
_KEEP_DAYS = 31
_LEAST_BYTES = 1_000_000  # room for the facts and some rounds


class WatchSettings(EngineSettings, frozen=True, kw_only=True):
    """Options of `pilotfish field watch`."""

    edge: Annotated[str, setting("the edge's address, tcp://HOST:PORT", metavar="ADDRESS")]
    out: Annotated[
        Path,
        setting("the run file; an existing watch is continued", metavar="RUN.pilotfish"),
    ]
    keys: EdgeKeys | None = None
    every_s: Annotated[
        float,
        setting(
            "time between two rounds (default: 5min)", form="span", metavar="TIME", flag="every"
        ),
    ] = 300.0
    for_s: (
        Annotated[
            float,
            setting(
                "length of the watch, restarts included, such as 24h (default: no end)",
                form="span",
                metavar="TIME",
                flag="for",
            ),
        ]
        | None
    ) = None
    draft: Annotated[
        Path,
        setting("the drafter, as for `device run`; text needs no model", metavar="MODEL|text"),
    ] = Path(TEXT)
    protocols: Annotated[
        tuple[str, ...],
        setting("protocols that give an answer each round", metavar="P,P,…"),
    ] = ("stream", "ahead", "auto")
    prompts: Annotated[Path, prompts_setting("'prompt' or 'question'")] | None = None
    max_tokens: Annotated[int, setting("maximum number of tokens of an answer", ge=1)] = 16
    keep_s: Annotated[
        float,
        setting(
            f"delete what is older than this (default: {_KEEP_DAYS}d)",
            form="span",
            metavar="TIME",
            flag="keep",
        ),
    ] = _KEEP_DAYS * 86400.0
    most_bytes: Annotated[
        int,
        setting(
            "maximum size of the run file; the oldest rounds are deleted (default: 200MB)",
            form="size",
            metavar="SIZE",
            gt=0,
        ),
    ] = 200_000_000
    probe: ProbeSettings = ProbeSettings()
    note: (
        Annotated[str, setting("a remark on the watch; the report shows it", metavar="TEXT")] | None
    ) = None
    name: (
        Annotated[str, setting("the device's name in reports; default: the host's", metavar="NAME")]
        | None
    ) = None
    metrics: MetricsAddress | None = None
    metrics_hosts: MetricsHosts = ()

    def __post_init__(self) -> None:
        if self.metrics is None and self.metrics_hosts:
            raise ConfigError("--metrics-host can only be used together with --metrics.")
        if self.every_s < _LEAST_EVERY_S:
            raise ConfigError(f"--every must be at least {_LEAST_EVERY_S:g} s.")
        if self.keep_s < self.every_s:
            raise ConfigError(
                f"--keep ({_KEEP_DAYS}d unless given) must be at least --every, or each round is "
                "deleted at once."
            )
        if self.most_bytes < _LEAST_BYTES:
            raise ConfigError(f"--most-bytes must be at least {_LEAST_BYTES // 1_000_000} MB.")

    @property
    def schedule(self) -> Schedule:
        """When the rounds are due."""
        return Schedule(self.every_s, self.for_s)

    @property
    def watch(self) -> Watch:
        """The schedule and the bounds, as facts of the run."""
        return Watch(
            every_s=self.every_s,
            for_s=self.for_s,
            keep_s=self.keep_s,
            most_bytes=self.most_bytes,
        )

    @property
    def matrix(self) -> MatrixSettings:
        """The answers of a round; raises `UnsupportedError` for a faulty file of prompts."""
        return MatrixSettings(
            prompts=BUILT_IN if self.prompts is None else read_prompts(self.prompts),
            protocols=self.protocols,
            windows=("auto",),
            repeat=1,
            max_tokens=self.max_tokens,
            provider=self.provider,
            threads=self.threads,
        )
