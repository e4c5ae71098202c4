"""Which inference runtime is there, and which of its providers works.

onnxruntime's own list of providers is what it was compiled with, so a provider counts only after
it has run the model. What was chosen and why others were not goes to the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from engines.errors import ProviderError

log = logging.getLogger("pilotfish.engines")

PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}  # best first
WHEELS = ("onnxruntime", "onnxruntime-gpu")

SESSION_CONFIG = {
    # Weights in 4 or 8 bits: multiply in int8, as MatMulNBits with accuracy_level 4 does.
    "session.qdq_matmulnbits_accuracy_level": "4",
}
# A drafter and a target may share cores, where workers that spin between runs halve each other's
# speed. Spinning for 200 µs bridges the gaps within a run and ends soon after it; runtimes
# that lack the setting (and ignore it) are told to stop with the run, which costs some speed.
SPIN_DURATION = ("session.intra_op.spin_duration_us", "200")
SPIN_DURATION_SINCE = (1, 31)
SPIN_STOP = ("session.force_spinning_stop", "1")


def runtime_version() -> tuple[int, ...]:
    """(major, minor) of the installed onnxruntime, whichever wheel it came from.

    Raises:
        ProviderError: if there is none, or both wheels are there and overwrite each other.
    """
    found = {}
    for wheel in WHEELS:
        try:
            found[wheel] = metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
    if not found:
        raise ProviderError(
            "no inference runtime is installed: pip install 'pilotfish[cpu]' or 'pilotfish[gpu]'"
        )
    if len(found) > 1:
        raise ProviderError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: "
            "pip uninstall both, then install 'pilotfish[cpu]' or 'pilotfish[gpu]'"
        )
    version = next(iter(found.values()))
    return tuple(int(part) for part in version.split(".")[:2])


def open_session(
    graph: Path, provider: str, threads: int | None, probe: Callable[[Any], None]
) -> tuple[Any, str]:
    """Load `graph` on the first provider that passes `probe`; return session and provider name.

    Args:
        provider: "cpu", "cuda", or "auto": the best one that works.
        threads: of one pass; None is one for each core that this process may use.
        probe: runs the session once, and raises if it cannot.

    Raises:
        ProviderError: if no runtime is there, or nothing that was asked for works.
    """
    spinning = SPIN_DURATION if runtime_version() >= SPIN_DURATION_SINCE else SPIN_STOP
    # From 1.31 on the wheels for Linux can report home, and write a file for it when imported.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    if provider != "auto" and provider not in PROVIDERS:
        raise ProviderError(f"unknown provider {provider!r}: choose auto, {', '.join(PROVIDERS)}")
    wanted = list(PROVIDERS) if provider == "auto" else [provider]
    compiled = onnxruntime.get_available_providers()
    reasons: list[str] = []
    for name in wanted:
        if PROVIDERS[name] not in compiled:
            reason = f"onnxruntime {onnxruntime.__version__} was built without it"
        else:
            session, reason = _try(onnxruntime, graph, name, _options(threads, spinning), probe)
            if session is not None:
                log.info("provider %s: it ran the model%s", name, _because(reasons))
                return session, name
        reasons.append(f"{name}: {reason}")
        log.info("provider %s cannot be used: %s", name, reason)
    raise ProviderError(f"no provider can run {graph}: {'; '.join(reasons)}")


def _options(threads: int | None, spinning: tuple[str, str]) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
    options.log_severity_level = 4
    for key, value in (*SESSION_CONFIG.items(), spinning):
        options.add_session_config_entry(key, value)
    return options


def _try(
    onnxruntime: Any, graph: Path, name: str, options: Any, probe: Callable[[Any], None]
) -> tuple[Any | None, str]:
    """A session that ran once, or None and the reason."""
    try:
        session = onnxruntime.InferenceSession(
            str(graph), options, providers=[PROVIDERS[name]], enable_fallback=False
        )
        if session.get_providers()[0] != PROVIDERS[name]:
            return None, "onnxruntime could not load it and took another in its place"
        probe(session)
    except Exception as error:  # onnxruntime raises its own classes and plain RuntimeError
        return None, str(error).strip().splitlines()[0]
    return session, ""


def _because(reasons: list[str]) -> str:
    return f" (fell back: {'; '.join(reasons)})" if reasons else ""
