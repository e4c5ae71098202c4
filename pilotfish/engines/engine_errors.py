"""Errors of opening or running an artifact.

Each message says what to do. `exit_code` is the exit status of the command line; the comments give
its name in sysexits.h.
"""

from __future__ import annotations

from pilotfish.base.errors import PilotfishError


class EngineError(PilotfishError):
    """Base of all deliberate errors of `engines` and `export`."""

    code = "engine"
    exit_code = 70  # EX_SOFTWARE


class ArtifactError(EngineError):
    """A directory is not an artifact, or its manifest or files are damaged."""

    exit_code = 66  # EX_NOINPUT


class TemplateError(EngineError):
    """A chat template does not compile, refuses the messages, or breaks its bounds."""

    code = "template"
    exit_code = 65  # EX_DATAERR


class TextTooLongError(EngineError):
    """A text has clearly more tokens than allowed."""

    exit_code = 65  # EX_DATAERR


class GrammarError(EngineError):
    """A grammar does not compile, is too complex, or leaves no token.

    costly: the failure took much CPU time. lasting: the grammar itself is at fault, so every
    attempt fails; otherwise the machine may be.
    """

    exit_code = 65  # EX_DATAERR
    costly = False
    lasting = True


class GrammarBusyError(GrammarError):
    """The machine cannot try or compile a grammar now; the grammar may be fine."""

    exit_code = 75  # EX_TEMPFAIL
    lasting = False


class CapacityError(EngineError):
    """More tokens than fit into the context of the model or the decoder."""

    exit_code = 65  # EX_DATAERR


class TreeError(EngineError):
    """A token tree for a model that reads only chains."""

    exit_code = 65  # EX_DATAERR


class ProviderError(EngineError):
    """The inference runtime is missing, installed twice, or has no working provider."""

    exit_code = 69  # EX_UNAVAILABLE


class CudaError(EngineError):
    """The CUDA runtime is missing, finds no GPU, or refused a call."""

    exit_code = 69  # EX_UNAVAILABLE


class BuildError(EngineError):
    """TensorRT cannot build an engine of the artifact; the message says why."""

    exit_code = 65  # EX_DATAERR
