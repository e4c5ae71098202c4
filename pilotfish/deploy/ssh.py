"""Run the installer on a running board, through the system's ``ssh`` command.

In:  ``user@host`` and an action. Out: the installer's exit code; its output passes through.

Guarantees: a bundle is admitted here before any byte is sent, and every sent file is compared with
the admitted manifest. On the board the installed version verifies the bundle again, with the
board's own signers, before any code of the bundle runs. If no installed version can verify bundles,
a copy of this machine's version does. Python on the board imports only from the installer's folder
or wheel and from its own library, not from the login's folder or from places that variables name.

The user's ssh checks host keys; no command asks for a password (``BatchMode``, ``sudo -n``). The
temporary copy on the board contains a secret key: only its owner can read the copy, and it is
removed at the end, also after an error or Ctrl-C.
"""

import io
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pilotfish.deploy import admission, manifest, signatures, wheelhouse
from pilotfish.deploy.admission import AdmissionPolicy, AdmittedBundle
from pilotfish.deploy.errors import BundleError, InstallError, RemoteError
from pilotfish.deploy.manifest import BundleManifest, CheckedReader, Entry, Progress
from pilotfish.deploy.rootfs import ELF_MACHINES
from pilotfish.deploy.wheels import Wheel

_SSH_FAILED = 255
# Python code. Prints the machines of a root file system's Pythons, from their ELF headers.
_MACHINES = """\
import glob, sys
for path in glob.glob(glob.escape(sys.argv[1]) + '/usr/bin/python3.*[0-9]'):
    with open(path, 'rb') as file:
        head = file.read(20)
    if head[:4] == b'\\x7fELF':
        print(head[18] + 256 * head[19], end=' ')
print()
"""
# Shell script. Prints these machines and the copy's folder, or exits with a code of `_REFUSALS`.
_PROBE = """\
command -v python3 >/dev/null && command -v tar >/dev/null || exit 41
python3 -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' || exit 42
[ "$(id -u)" = 0 ] || sudo -n true || exit 43
python3 -I -c {machines} {root} || echo
umask 077
mktemp -d "${{TMPDIR:-/var/tmp}}/pilotfish-XXXXXXXX" || exit 44
"""
_REFUSALS = {
    41: "the board lacks python3 or tar",
    42: "the board's python3 is older than 3.10",
    43: "this user may not use sudo without a password: log in as root, or allow it in the "
    "board's sudoers file",
    44: "the board cannot make a temporary folder",
}
# _TRUSTED: modules of the board's current version. _VERIFIER: one of their files; versions that
# knew no signatures lack it.
_TRUSTED = "/opt/pilotfish/current/site"
_VERIFIER = f"{_TRUSTED}/pilotfish/deploy/admission.py"
_OWN = "flashing.whl"
_RUN = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from pilotfish.deploy.install import main; sys.exit(main())"
)

Source = bytes | tuple[Path, str, Entry]  # a file's content, or a file of a bundle
Sources = Mapping[str, Source]  # name in the copy → source


@dataclass(frozen=True)
class Board:
    """A machine that ssh reaches. options: for ``ssh -o``. root: root file system to install in."""

    address: str
    port: int | None = None
    options: Sequence[str] = ()
    root: str = "/"

    def install(
        self,
        bundle: Path,
        policy: AdmissionPolicy,
        arguments: Sequence[str],
        say: Callable[[str], None],
        progress: Progress,
    ) -> int:
        """Admit a bundle, copy it to the board and install it.

        arguments: the installer's, without those about signers and the bundle.
        """
        admitted = admission.admit(bundle, policy, say)
        contents = admitted.manifest
        contents.verify(bundle, progress)
        wheels = [path for path in contents.files if path.startswith("wheels/")]
        wheel = next((path for path in wheels if _is_ours(path)), None)
        if wheel is None:
            raise BundleError(
                "The bundle has no wheel of pilotfish: make it again with `pilotfish bundle`."
            )
        words = [*arguments, *(["--downgrade"] if policy.downgrade else [])]
        sources = {**_sources(bundle, admitted), **_running_pilotfish()}
        with self._copied(sources, progress, contents) as there:
            words += ["--signers", f"{there}/trusted"] if admitted.signers else ["--unsigned"]
            words += [f"{there}/bundle"]
            install = f"{_python(f'{there}/bundle/{wheel}')} {shlex.join(words)}"
            here, installed = (
                f"{_python(place)} --verify {shlex.join(words)}"
                for place in (f"{there}/{_OWN}", _TRUSTED)
            )
            verify = f"if [ -e {_VERIFIER} ]; then {installed}; else {here}; fi"
            return self._as_root(f"{verify} && {install}")

    def do(self, arguments: Sequence[str], progress: Progress) -> int:
        """Run the installer on the board without a bundle: check, roll back or uninstall."""
        with self._copied(_running_pilotfish(), progress) as there:
            return self._as_root(f"{_python(f'{there}/{_OWN}')} {shlex.join(arguments)}")

    def _as_root(self, script: str) -> int:
        """Run a script on the board as root; return its exit code."""
        command = f"sh -c {shlex.quote(script)}"
        done = subprocess.run(
            self._ssh(f'cd / && if [ "$(id -u)" = 0 ]; then {command}; else sudo -n {command}; fi'),
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode == _SSH_FAILED:
            raise RemoteError(
                f"The connection to {self.address} broke. Each step there was either completed "
                "or not begun: run the same command again."
            )
        return done.returncode

    @contextmanager
    def _copied(
        self, sources: Sources, progress: Progress, contents: BundleManifest | None = None
    ) -> Iterator[str]:
        """Yield a temporary folder on the board with copies of these files.

        contents: manifest of the bundle among the files; `InstallError` if it is for another
        machine.
        """
        machines, there = self._probe()
        trouble = ""
        try:
            if contents is not None and machines and contents.machine not in machines:
                raise InstallError(
                    f"The bundle is for {contents.machine}, but {self.address} is for "
                    f"{' and '.join(sorted(machines))}: make another bundle with --machine or "
                    "--jetpack."
                )
            self._send(sources, there, progress)
            yield there
        except RemoteError as error:
            trouble = f"{error} "
            raise
        finally:
            left = self._ssh(f"rm -rf -- {shlex.quote(there)}")
            if subprocess.run(left, check=False, stdin=subprocess.DEVNULL).returncode != 0:
                raise RemoteError(
                    f"{trouble}{self.address} still has a temporary copy of the bundle: remove "
                    f"{there} there."
                )

    def _probe(self) -> tuple[set[str], str]:
        """Make a temporary folder; return the machines of the board's Pythons, and its path."""
        script = _PROBE.format(machines=shlex.quote(_MACHINES), root=shlex.quote(self.root))
        done = subprocess.run(
            self._ssh(script), check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            reason = _REFUSALS.get(done.returncode, lines[-1] if lines else "ssh gives no reason")
            raise RemoteError(f"{self.address} cannot be used: {reason}.")
        lines = done.stdout.splitlines()[-2:]
        if len(lines) < 2 or not lines[1].startswith("/"):
            raise RemoteError(
                f"{self.address} cannot be used: the shell of this user runs no commands."
            )
        numbers = (int(word) for word in lines[0].split() if word.isdecimal())
        return {ELF_MACHINES.get(number, f"machine {number}") for number in numbers}, lines[1]

    def _send(self, sources: Sources, there: str, progress: Progress) -> None:
        """Stream the files as a tar archive, so that nothing but ssh and tar is needed."""
        total = sum(_size(source) for source in sources.values())
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            progress("copying to the board", done, total)

        command = self._ssh(f"umask 077; tar -xf - --no-same-owner -C {shlex.quote(there)}")
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            with (
                suppress(BrokenPipeError),  # the exit code below shows the failure
                tarfile.open(fileobj=process.stdin, mode="w|") as archive,
            ):
                for name, source in sources.items():
                    info = tarfile.TarInfo(name)
                    info.size, info.mode = _size(source), 0o600
                    with _open_source(source) as file:
                        archive.addfile(info, _CountingFile(file, count))
            with suppress(BrokenPipeError):
                process.stdin.close()
        if process.returncode != 0:
            raise RemoteError(f"The bundle could not be copied to {self.address}.")

    def _ssh(self, command: str) -> list[str]:
        if shutil.which("ssh") is None:
            raise RemoteError(
                "The command ssh is missing on this machine: install an OpenSSH client."
            )
        options = ("BatchMode=yes", "ServerAliveInterval=15", *self.options)
        port = [] if self.port is None else ["-p", str(self.port)]
        return [
            *("ssh", "-T", *port),
            *(word for option in options for word in ("-o", option)),
            *("--", self.address, command),
        ]


def _sources(bundle: Path, admitted: AdmittedBundle) -> Sources:
    """Return the files of an admitted bundle, and the signers trusted here."""
    files: dict[str, Source] = {f"bundle/{manifest.NAME}": admitted.raw}
    if admitted.signers and admitted.signature:
        files[f"bundle/{signatures.NAME}"] = admitted.signature
        files |= {f"trusted/{name}": key for name, key in admitted.signers.files().items()}
    return files | {
        f"bundle/{path}": (bundle, path, entry) for path, entry in admitted.manifest.files.items()
    }


def _running_pilotfish() -> dict[str, Source]:
    """Return a wheel of the pilotfish that runs this code, by its file name."""
    with tempfile.TemporaryDirectory() as scratch:
        return {_OWN: wheelhouse.pack(Path(scratch)).path.read_bytes()}


def _is_ours(path: str) -> bool:
    return Wheel.from_path(Path(path)).name == wheelhouse.NAME


def _size(source: Source) -> int:
    return len(source) if isinstance(source, bytes) else source[2].size


@contextmanager
def _open_source(source: Source) -> Iterator[io.BytesIO | CheckedReader]:
    if isinstance(source, bytes):
        yield io.BytesIO(source)
    else:
        with manifest.reading(*source) as file:
            yield file


def _python(place: str) -> str:
    """Return the start of a command that runs the installer from ``place``, a folder or a wheel."""
    return shlex.join(["python3", "-I", "-B", "-c", _RUN, place])


class _CountingFile:
    """A file that counts the bytes read from it."""

    def __init__(self, file: io.BytesIO | CheckedReader, tell: Callable[[int], None]) -> None:
        self._file = file
        self._tell = tell

    def read(self, size: int = -1, /) -> bytes:
        """Read the next ``size`` bytes."""
        data = self._file.read(size)
        self._tell(len(data))
        return data
