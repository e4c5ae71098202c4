"""Take the installer to a board that runs, over the system's own ``ssh``.

In:  ``user@host`` and what to do there. Out: the installer's exit code; what it says passes
     through.
Law: host keys are checked as the user's ssh does it, nothing asks for a password (``BatchMode``,
``sudo -n``), and the temporary copy on the board, which holds a secret key, is readable by its
owner only and removed at the end, also after an error or Ctrl-C.
"""

import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from deploy import manifest, wheelhouse
from deploy.errors import BundleError, RemoteError
from deploy.manifest import Progress

_SSH_FAILED = 255
# Prints the folder that the copy goes to, or ends with one of the codes below.
_PROBE = """\
command -v python3 >/dev/null && command -v tar >/dev/null || exit 41
python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || exit 42
[ "$(id -u)" = 0 ] || sudo -n true || exit 43
umask 077
mktemp -d "${TMPDIR:-/var/tmp}/pilotfish-XXXXXXXX" || exit 44
"""
_REFUSALS = {
    41: "it lacks python3 or tar",
    42: "its python3 is older than 3.10",
    43: "this user may not use sudo without a password: log in as root, or allow it in sudoers",
    44: "no temporary folder can be made",
}


@dataclass(frozen=True)
class Board:
    """A machine that ssh reaches. options: for ``ssh -o``."""

    address: str
    port: int | None = None
    options: Sequence[str] = ()

    def install(self, bundle: Path, arguments: Sequence[str], progress: Progress) -> int:
        """Check a bundle, copy it there and install it; ``arguments`` are the installer's."""
        held = manifest.read(bundle)
        held.verify(bundle, progress)
        wheel = next((path for path in held.files if path.startswith("wheels/pilotfish-")), None)
        if wheel is None:
            raise BundleError("The bundle holds no wheel of pilotfish.")
        paths = [manifest.NAME, *held.files]
        with self._copied(bundle, paths, progress) as there:
            return self._installer(there, wheel, [*arguments, there])

    def do(self, arguments: Sequence[str], progress: Progress) -> int:
        """Run the installer there without a bundle: to check, to go back, to uninstall."""
        with tempfile.TemporaryDirectory() as scratch:
            wheel = wheelhouse.pack(Path(scratch)).path.name
            with self._copied(Path(scratch), [wheel], progress) as there:
                return self._installer(there, wheel, arguments)

    def _installer(self, there: str, wheel: str, arguments: Sequence[str]) -> int:
        # -I would not take the path; env, since sudo clears the environment
        words = ["env", f"PYTHONPATH={there}/{wheel}", "python3", "-B", "-m", "deploy.install"]
        command = shlex.join([*words, *arguments])
        done = subprocess.run(
            self._ssh(f'if [ "$(id -u)" = 0 ]; then {command}; else sudo -n {command}; fi'),
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode == _SSH_FAILED:
            raise RemoteError(
                f"The connection to {self.address} broke. What was begun there is whole or not "
                "there at all: run the same command again."
            )
        return done.returncode

    @contextmanager
    def _copied(self, folder: Path, paths: Sequence[str], progress: Progress) -> Iterator[str]:
        """A temporary folder on the board with copies of these files."""
        there = self._probe()
        trouble = ""
        try:
            self._send(folder, paths, there, progress)
            yield there
        except RemoteError as error:
            trouble = f"{error} "
            raise
        finally:
            left = self._ssh(f"rm -rf -- {shlex.quote(there)}")
            if subprocess.run(left, check=False, stdin=subprocess.DEVNULL).returncode != 0:
                raise RemoteError(
                    f"{trouble}{self.address} keeps a temporary copy: remove {there} there."
                )

    def _probe(self) -> str:
        done = subprocess.run(
            self._ssh(_PROBE), check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            reason = _REFUSALS.get(done.returncode, lines[-1] if lines else "ssh gives no reason")
            raise RemoteError(f"{self.address} cannot be used: {reason}.")
        there = (done.stdout.strip().splitlines() or [""])[-1]
        if not there.startswith("/"):
            raise RemoteError(f"{self.address} cannot be used: its shell runs no commands.")
        return there

    def _send(self, folder: Path, paths: Sequence[str], there: str, progress: Progress) -> None:
        """Stream the files as a tar archive, so that nothing but ssh and tar is needed."""
        total = sum((folder / path).stat().st_size for path in paths)
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            progress("copying to the board", done, total)

        command = self._ssh(f"umask 077; tar -xf - --no-same-owner -C {shlex.quote(there)}")
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            with (
                suppress(BrokenPipeError),  # its exit code says why
                tarfile.open(fileobj=process.stdin, mode="w|") as archive,
            ):
                for path in paths:
                    info = archive.gettarinfo(folder / path, arcname=path)
                    with (folder / path).open("rb") as file:
                        archive.addfile(info, _Counted(file, count))
            with suppress(BrokenPipeError):
                process.stdin.close()
        if process.returncode != 0:
            raise RemoteError(f"The bundle could not be copied to {self.address}.")

    def _ssh(self, command: str) -> list[str]:
        if shutil.which("ssh") is None:
            raise RemoteError("ssh is missing here: install an OpenSSH client.")
        options = ("BatchMode=yes", "ServerAliveInterval=15", *self.options)
        port = [] if self.port is None else ["-p", str(self.port)]
        return [
            *("ssh", "-T", *port),
            *(word for option in options for word in ("-o", option)),
            *("--", self.address, command),
        ]


class _Counted:
    """A file that tells how much was read from it."""

    def __init__(self, file: BinaryIO, tell: Callable[[int], None]) -> None:
        self._file = file
        self._tell = tell

    def read(self, size: int = -1, /) -> bytes:
        """The next ``size`` bytes."""
        data = self._file.read(size)
        self._tell(len(data))
        return data
