"""The two TensorRTs that can run our engines: the standard one, and TensorRT for RTX.

They differ by module, by what an engine is built for, and by the gates of `engines.tensorrt.gates`.
An edition is imported when it is needed: it is large, and mostly not installed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pilotfish.base.extras import install_command
from pilotfish.engines.engine_errors import ProviderError

log = logging.getLogger("pilotfish.tensorrt")
JETSON = Path("/etc/nv_tegra_release")
_loggers: dict[type, Any] = {}


@dataclass(frozen=True)
class Edition:
    """A TensorRT.

    Attributes:
        provider: name of the provider, and extra that installs the edition with pip.
        title: name in messages.
        modules: names of its Python package; the first that is installed is taken.
        any_gpu: whether an engine is built without a GPU, for all GPUs of some compute
            capabilities. Otherwise it is built on a GPU, for this model of GPU.
    """

    provider: str
    title: str
    modules: tuple[str, ...]
    any_gpu: bool

    @property
    def is_installed(self) -> bool:
        """Whether Python finds the edition; nothing is imported."""
        return any(find_spec(name) is not None for name in self.modules)

    def load(self) -> Any:
        """Import the edition.

        Raises:
            ProviderError: if it is not installed; the message says how to install it.
        """
        reason: ImportError | None = None
        for name in self.modules:
            try:
                return import_module(name)
            except ImportError as error:
                reason = reason or error
        raise ProviderError(
            f"{self.title} cannot be imported ({reason}): {self._source()}"
        ) from None

    def version(self) -> str:
        """Return the version of the installed edition.

        Raises:
            ProviderError: if it is not installed.
        """
        version: str = self.load().__version__
        return version

    def logger(self) -> Any:
        """Return a logger that writes TensorRT's messages to our log, with errors as warnings.

        Callers decide how severe an error is. The result is always the same object: TensorRT needs
        one logger for as long as any of its objects exists.
        """
        trt = self.load()
        if trt.ILogger not in _loggers:
            _loggers[trt.ILogger] = _new_logger(trt)
        return _loggers[trt.ILogger]

    def last_error(self) -> str:
        """Return the last error that TensorRT logged in this process; "" if there was none."""
        message: str = self.logger().last_error
        return message

    def command(self, artifact: Path) -> str:
        """Return the command that builds an engine of an artifact."""
        option = f" --provider {self.provider}" if self.any_gpu else ""
        return f"pilotfish export engine {artifact}{option}"

    def _source(self) -> str:
        """Return where the edition comes from, as an instruction."""
        if self.any_gpu:
            return install_command(self.provider)
        if JETSON.exists():
            return (
                "it comes with JetPack: sudo apt install python3-libnvinfer (for the system's "
                "Python)"
            )
        return (
            f"{install_command(self.provider)} and NVIDIA's driver; on a Jetson: sudo "
            "apt install python3-libnvinfer"
        )


STANDARD = Edition("tensorrt", "TensorRT", ("tensorrt",), any_gpu=False)
# NVIDIA's archive has the module tensorrt_rtx, the wheels of the index have tensorrt_rtx_bindings.
RTX = Edition(
    "tensorrt-rtx", "TensorRT for RTX", ("tensorrt_rtx_bindings", "tensorrt_rtx"), any_gpu=True
)
EDITIONS = (STANDARD, RTX)


def edition_of(provider: str) -> Edition | None:
    """Return the edition of a provider; None if the provider has none."""
    return next((each for each in EDITIONS if each.provider == provider), None)


def _new_logger(trt: Any) -> Any:
    class Log(trt.ILogger):  # type: ignore[misc]  # a class of a library that has no types
        last_error = ""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if severity in {trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR}:
                self.last_error = msg
                log.warning("%s", msg)
            elif severity != trt.ILogger.VERBOSE:
                log.debug("%s", msg)

    return Log()
