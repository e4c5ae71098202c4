"""What can go wrong when an artifact is opened or run.

Each error carries a sentence that says what to do, and the exit code that the command line ends
with (the names in the comments are those of sysexits.h).
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything that `engines` and `export` raise on purpose."""

    exit_code = 70  # EX_SOFTWARE


class ArtifactError(EngineError):
    """A directory is not an artifact, or its manifest or files are not what they should be."""

    exit_code = 66  # EX_NOINPUT


class TemplateError(EngineError):
    """A chat template does not compile, refuses the messages, or breaks its bounds."""

    exit_code = 65  # EX_DATAERR


class TextTooLongError(EngineError):
    """A text of clearly more tokens than it may have."""

    exit_code = 65  # EX_DATAERR


class CapacityError(EngineError):
    """More tokens than the context of the model or of the decoder holds."""

    exit_code = 65  # EX_DATAERR


class ProviderError(EngineError):
    """The inference runtime is missing, is there twice, or has no provider that works."""

    exit_code = 69  # EX_UNAVAILABLE


class CudaError(EngineError):
    """The CUDA runtime is missing, finds no GPU, or refused a call."""

    exit_code = 69  # EX_UNAVAILABLE


class BuildError(EngineError):
    """No TensorRT engine could be built of an artifact, and the sentence says why."""

    exit_code = 65  # EX_DATAERR
