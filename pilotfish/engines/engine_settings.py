"""Settings of the engine, shared by both daemons and most commands."""

from typing import Annotated

from msgspec import Meta, Struct

_THREADS = Meta(
    description="number of CPU threads (default: one for each CPU that this process may use)",
    ge=1,
    extra={"metavar": "N"},
)


class EngineSettings(Struct, frozen=True, kw_only=True):
    """The provider and the number of threads for a model (see `pilotfish.base.settings`)."""

    provider: Annotated[
        str,
        Meta(
            description="auto (default), cpu, cuda, tensorrt, tensorrt-rtx or tensorrt-ep "
            "(docs/engines.md)"
        ),
    ] = "auto"
    threads: Annotated[int, _THREADS] | None = None
