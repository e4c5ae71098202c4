"""Verify a model's files against their hashes in the background, while a daemon serves.

In: an opened artifact. Out: `passed`, or `damage`, a sentence that names the file. Hashing
gigabytes takes longer than loading them, so the daemon does not wait. A thread reads each file
once, piece by piece, and pauses after each piece to use only `SHARE` of a core and of the disk.
hashlib and reads release the interpreter's lock. The thread has normal priority: with a lower one,
the kernel could pause it while it holds the interpreter's lock, and a round would wait.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack
from io import RawIOBase

from pilotfish.engines.artifact import Artifact, sha256_of
from pilotfish.engines.engine_errors import ArtifactError

_log = logging.getLogger("pilotfish.engines")

SHARE = 0.2  # fraction of a core's time that hashing may use
PIECE_BYTES = 1 << 18  # a piece is hashed in well under 1 ms, so a pass of the model hardly waits


class Inspection:
    """A thread that hashes an artifact's files.

    Without an artifact (a drafter without a model) there is nothing to hash, and `passed` is true
    at once. The files are opened in the constructor: if another model replaces them later, the old
    files are still the ones hashed. passed: whether every file matches the manifest. damage: the
    problem, also logged; "" while none is known. Any thread may read `passed` and `damage`.

    Raises:
        ArtifactError: if a file cannot be opened.
    """

    def __init__(self, artifact: Artifact | None) -> None:
        self.passed = artifact is None
        self.damage = ""
        self._artifact = artifact
        self._files: dict[str, RawIOBase] = {}
        self._close = threading.Event()
        self._thread = threading.Thread(target=self._inspect, name="inspection", daemon=True)
        paths = artifact.paths if artifact is not None else {}
        with ExitStack() as stack:
            for name, path in paths.items():
                try:
                    self._files[name] = stack.enter_context(path.open("rb", buffering=0))
                except FileNotFoundError:
                    raise ArtifactError(f"{path} is missing: export the model again") from None
                except OSError as error:
                    raise ArtifactError(
                        f"{path} cannot be read: {error.strerror}; this process runs as user "
                        f"{os.geteuid()}"
                    ) from None
            self._opened = stack.pop_all()

    def start(self) -> None:
        """Start the thread; return at once."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, even if it has not finished, and close the files."""
        self._close.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._opened.close()

    def _inspect(self) -> None:
        if self._artifact is None:
            return
        began_s = time.monotonic()
        path = self._artifact.path
        try:
            for name, file in self._files.items():
                path = self._artifact.path / name
                digest = sha256_of(file, _Throttle(self._close), PIECE_BYTES)
                if digest != self._artifact.manifest.files[name]:
                    raise self._artifact.altered_error(name)
        except _ClosedError:
            return
        except OSError as error:
            self._report(f"{path} cannot be read ({error.strerror}): restore a copy of this file")
        except ArtifactError as error:
            self._report(str(error))
        else:
            self.passed = True
            _log.info(
                "the files of %s match their hashes, verified in %.1f s",
                self._artifact.path, time.monotonic() - began_s,
            )  # fmt: skip
        # close the files, since files of a replaced model occupy the disk while they are open
        finally:
            self._opened.close()

    def _report(self, damage: str) -> None:
        _log.error("the model that is served is damaged: %s", damage)
        self.damage = damage


class _ClosedError(Exception):
    """The inspection was closed before it finished."""


class _Throttle:
    """A pause after each piece, so that hashing takes a fixed fraction of the time."""

    def __init__(self, close: threading.Event) -> None:
        self._close = close
        self._since_s = time.monotonic()

    def __call__(self, size: int) -> None:
        worked_s = time.monotonic() - self._since_s
        if self._close.wait(worked_s * (1 / SHARE - 1)):
            raise _ClosedError
        self._since_s = time.monotonic()
