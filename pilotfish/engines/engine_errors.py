"""Errors of opening or running an artifact.

Each message tells the user what to do. `exit_code` is the exit status of the command line; the
comment beside each value is its name in sysexits.h.
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
    """A text has more tokens than the caller allows."""

    code = "too-large"
    exit_code = 65  # EX_DATAERR


class GrammarError(EngineError):
    """A grammar does not compile, is too complex, or leaves no token.

    costly: whether the failure took much CPU time. lasting: whether the grammar itself is at fault,
    so that every attempt fails; if false, the machine may be at fault.
    """

    exit_code = 65  # EX_DATAERR
    costly = False
    lasting = True


class GrammarBusyError(GrammarError):
    """The machine cannot compile a grammar at the moment; the grammar may be valid."""

    exit_code = 75  # EX_TEMPFAIL
    lasting = False


class CapacityError(EngineError):
    """A slot would have more tokens than the context of the model or the decoder."""

    exit_code = 65  # EX_DATAERR


class TreeError(EngineError):
    """A pass has a token tree, but the model reads only chains."""

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


class FormError(BuildError):
    """TensorRT can never read the artifact: its dialect or precision is another's."""


class EngineFileError(EngineError):
    """A file of a TensorRT engine is damaged, or cannot serve this artifact on this machine."""

    exit_code = 65  # EX_DATAERR


class EngineFolderError(EngineError):
    """A TensorRT engine cannot be written into its folder."""

    exit_code = 73  # EX_CANTCREAT
