"""Install a bundle into a root file system; ``/`` is the running system.

    PYTHONPATH=bundle/wheels/pilotfish-….whl python3 -m pilotfish.deploy.install --root / bundle/

The command above is for a trusted bundle only, since the bundle's own code verifies the bundle.
(`deploy.ssh` lets the installed version verify it.)

In:  a bundle (`deploy.admission`) and a root. Out: the current version, its configuration, keys
and units, and a line for each step.
Guarantees: the bundle is checked completely before anything is written. One rename makes the new
version current, and the old version is untouched before that rename. After a kill or a power cut,
another run completes the installation. Installing the same bundle again changes nothing.

Standard library only: this runs on the board before anything is installed.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pilotfish.base.errors import KeysError
from pilotfish.deploy import (
    admission,
    board_record,
    files,
    manifest,
    precedence,
    settings,
    system,
)
from pilotfish.deploy.admission import AdmissionPolicy, AdmittedBundle
from pilotfish.deploy.board_record import RootFacts
from pilotfish.deploy.bytecode import compile_modules
from pilotfish.deploy.errors import (
    BundleError,
    InstallError,
    PrivilegeError,
    ServiceError,
    exit_code_of,
)
from pilotfish.deploy.manifest import BundleManifest, Progress
from pilotfish.deploy.rootfs import Rootfs, resolve
from pilotfish.deploy.versions import HOME, Versions
from pilotfish.deploy.wheels import Wheel

# Role → installed name of its artifact; the configuration uses this name.
ARTIFACTS = {"device": "draft", "edge": "target"}
STATE = ("var/lib/pilotfish", "var/cache/pilotfish")
LAUNCHER = """\
#!{python} -s
import os
import sys

site = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "site")
sys.path[0] = site
os.environ["PYTHONPATH"] = site  # for the processes that this one starts
# else root would write bytecode, and an installation holds only what was installed
sys.dont_write_bytecode = True
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

from pilotfish.cli import main

sys.exit(main())
"""
_PATIENCE_S = 300.0


def _silent(_what: str, _done: int, _total: int) -> None:
    """Ignore progress."""


@dataclass
class Installation:
    """A root file system and its installation.

    say: called with a line for each step.
    """

    root: Rootfs
    say: Callable[[str], None]
    progress: Progress = _silent

    def __post_init__(self) -> None:
        if os.geteuid() != 0:
            raise PrivilegeError(
                f"Files below {self.root.root} must belong to root: run this command with sudo."
            )
        system.require_tools()
        # HOME may be a link to another disk
        self.versions = Versions(resolve(self.root.root, HOME))

    def verify(self, bundle: Path, policy: AdmissionPolicy) -> AdmittedBundle:
        """Check completely whether a bundle may be installed here; change nothing."""
        signers = resolve(self.root.root, settings.SIGNERS)
        link = self.root.path(settings.SIGNERS)
        if os.path.lexists(link) and not signers.exists() and not policy.unsigned:
            # a broken link does not mean that there are no signers: their disk may not be mounted
            raise KeysError(
                f"{link} is a broken link to the folder of trusted signers: repair "
                "the link, or mount the disk that it leads to."
            )
        admitted = admission.admit(bundle, policy, self.say, signers)
        contents = admitted.manifest
        self.root.require(contents.python, contents.machine)
        if not policy.downgrade:
            self._require_no_older(contents)
        contents.verify(bundle, self.progress)
        _require_fitting(bundle, contents)
        board = board_record.read(bundle, contents)
        if board is not None:
            board.require(RootFacts.read(self.root))
        return admitted

    def install(self, bundle: Path, policy: AdmissionPolicy) -> None:
        """Install a bundle and make it current; on the running system, start it as well."""
        admitted = self.verify(bundle, policy)
        contents = admitted.manifest
        self._tell(self._board_sentences(bundle, contents))
        os.umask(0o022)
        with self.versions.locked():
            # checked again, since another installation may have ended meanwhile
            if not policy.downgrade:
                self._require_no_older(contents)
            before, earlier = self.versions.current, self.versions.previous
            if contents.name not in self.versions.names() or self.versions.faults(contents.name):
                self._stage(bundle, admitted)
            self._tell(settings.bring_keys(self.root, bundle, contents))
            self._tell(settings.bring_signers(self.root, bundle, admitted))
            if self.versions.switch(contents.name):
                self.say(f"version {contents.name} is current")
            self._settle(contents.name)
            trouble = self._start()
            if trouble is not None and before is not None and before != contents.name:
                self.versions.undo(before, earlier)
                self._settle(before)
                again = self._start()
                trouble += f"\nWent back to version {before}, which "
                trouble += "is active." if again is None else "does not start either."
            self.versions.prune()
        if trouble is not None:
            raise ServiceError(trouble)

    def roll_back(self) -> None:
        """Make the previous version current again; on the running system, start it as well."""
        os.umask(0o022)
        with self.versions.locked():
            name = self.versions.roll_back()
            self.say(f"version {name} is current again")
            self._settle(name)
            trouble = self._start()
        if trouble is not None:
            raise ServiceError(trouble)

    def uninstall(self, *, purge: bool) -> None:
        """Remove every version and unit. purge: remove configuration, keys and state as well."""
        if not self.versions.home.exists() and not purge:
            raise InstallError(f"Nothing is installed in {self.root.root}.")
        if purge and system.packaged(self.root):
            raise InstallError(
                "The package pilotfish-edge has its settings and state in the same folders: purge "
                "it first, or leave out --purge."
            )
        with self.versions.locked():
            self._tell(system.withdraw(self.root, self.versions))
            for link in ("current", "previous"):
                files.remove(self.versions.home / link)
            self.versions.prune()
            files.remove_tree(self.versions.home)
        self.say(f"{self.versions.home} removed")
        for folder in (settings.FOLDER, *STATE) if purge else ():
            if files.remove_tree(self.root.path(folder)):
                self.say(f"/{folder} removed")

    def check(self) -> list[str]:
        """Compare the installation with its record; return a sentence for each fault."""
        name = self.versions.current
        if name is None:
            return [f"Nothing is installed in {self.root.root}."]
        faults = self.versions.faults(name)
        try:
            contents = self._manifest(name)
        except BundleError:  # `faults` may name the damaged manifest already
            return faults or [f"{self.versions.folder(name) / manifest.NAME} is damaged."]
        self.say(f"version {name} (role {contents.role}) is current")
        if self.versions.previous not in (None, name):
            self.say(f"version {self.versions.previous} is kept for --rollback")
        for edited in settings.edited_files(self.root, self.versions, name):
            self.say(f"/{settings.FOLDER}/{edited} was edited")
        packaged = system.packaged(self.root)
        for source, place in system.targets(self.versions.folder(name) / "systemd").items():
            if place in packaged:
                continue
            if not files.holds(self.root.path(place), source.read_bytes()):
                faults.append(f"/{place} is missing or was changed.")
        for unit in system.units(self.versions, name, contents.role):
            if system.is_enabled(self.root, unit):
                self.say(f"{unit} is enabled")
            else:
                faults.append(f"{unit} is not enabled.")
        return faults

    def _board_sentences(self, bundle: Path, contents: BundleManifest) -> Iterator[str]:
        """Yield what to expect of the bundle on its board, and how this machine differs from it."""
        board = board_record.read(bundle, contents)
        if board is not None:
            yield from board.sentences(RootFacts.read(self.root))
            return
        model = ARTIFACTS[contents.role]
        sentence = board_record.sentence_without_record(bundle, contents, model, self.root)
        if sentence is not None:
            yield sentence

    def _require_no_older(self, contents: BundleManifest) -> None:
        """Raise `InstallError` unless a bundle's version is the current one or a later one."""
        if self.versions.current is None:
            return
        there = self.versions.current.rpartition("-")[0]
        if precedence.is_older(contents.version, there) is not False:
            raise InstallError(
                f"The bundle holds version {contents.version}, and {there} is installed in "
                f"{self.root.root}: give --downgrade to install an older version."
            )

    def _stage(self, bundle: Path, admitted: AdmittedBundle) -> None:
        """Make the version's folder under a hidden name, then rename it."""
        contents = admitted.manifest
        fresh = self.versions.incoming(contents.name)
        try:
            self._fill(fresh, bundle, contents)
            # compiled now: the service may only read these folders
            if not compile_modules(fresh / "site", f"/{HOME}/current/site", contents.python):
                self.say(
                    f"this machine has no python{contents.python}, so modules are not compiled"
                )
            self.progress("writing to disk", 0, 1)
            self.versions.adopt(fresh, contents.name)
            self.progress("writing to disk", 1, 1)
        finally:
            files.remove_tree(fresh)
        signed = f"signed by {admitted.signer}" if admitted.signer else "its signature not checked"
        self.say(f"version {contents.name} installed, {signed}")

    def _fill(self, fresh: Path, bundle: Path, contents: BundleManifest) -> None:
        """Unpack the wheels, copy the rest, write the launcher."""
        python = f"/usr/bin/python{contents.python}"
        wheels = [path for path in contents.files if path.startswith("wheels/")]
        for count, path in enumerate(wheels):
            self.progress("unpacking wheels", count, len(wheels))
            # unpack a private copy: others may change the bundle's file after it was hashed
            with tempfile.TemporaryFile(dir=fresh) as copy:
                with manifest.reading(bundle, path, contents.files[path]) as source:
                    shutil.copyfileobj(source, copy)
                Wheel.from_path(bundle / path).unpack(fresh, python, copy)
        self.progress("unpacking wheels", len(wheels), len(wheels))
        for path, entry in contents.files.items():
            if path.split("/")[0] in ("artifacts", "systemd", "config"):
                _copy(bundle, path, fresh / path, entry)
        (fresh / "bin").mkdir(exist_ok=True)
        launcher = fresh / "bin" / "pilotfish"
        launcher.write_text(LAUNCHER.format(python=python))
        launcher.chmod(0o755)
        name = ARTIFACTS[contents.role]
        if (fresh / "artifacts" / name).is_dir():
            os.symlink(f"artifacts/{name}", fresh / name)
        (fresh / manifest.NAME).write_bytes(contents.encode())

    def _settle(self, name: str) -> None:
        """Write the parts of a version outside its folder: write configuration and units.

        Enable units.
        """
        role = self._manifest(name).role
        self._tell(settings.bring_configuration(self.root, self.versions, name))
        self._tell(system.apply_version(self.root, self.versions, name))
        state = self.root.path(f"{STATE[0]}/target")
        if role == "edge" and not os.path.lexists(state):
            files.link(state, f"/{HOME}/current/target")
        self._tell(system.enable(self.root, self.versions, name, role))

    def _start(self) -> str | None:
        """On the running system, start the current version; return why it fails, or None."""
        name = self.versions.current
        if not self.root.live or name is None:
            return None
        unit = system.units(self.versions, name, self._manifest(name).role)[0]
        self.progress(f"starting {unit}", 0, 1)
        trouble = system.restart(unit, _PATIENCE_S)
        self.progress(f"starting {unit}", 1, 1)
        if trouble is None:
            self.say(f"{unit} is active")
            if system.may_build_engine(self.root, self.versions, name):
                self.say(
                    "to do: let the board's GPU draft. Build the engine, which takes minutes, now "
                    f"or at the next start: sudo systemctl restart {system.ENGINE_BUILD} && sudo "
                    f"systemctl restart {unit}"
                )
        return trouble

    def _manifest(self, name: str) -> BundleManifest:
        return manifest.read(self.versions.folder(name))

    def _tell(self, done: Iterator[str]) -> None:
        for line in done:
            self.say(line)


def _require_fitting(bundle: Path, contents: BundleManifest) -> None:
    """Raise `BundleError` if a wheel does not fit, or pilotfish's own wheel is missing."""
    wheels = [
        Wheel.from_path(bundle / path) for path in contents.files if path.startswith("wheels/")
    ]
    for wheel in wheels:
        if not wheel.fits(contents.python, contents.machine):
            board = f"Python {contents.python} on {contents.machine}"
            raise BundleError(f"{wheel.path.name} is not for {board}.")
    if "pilotfish" not in {wheel.name for wheel in wheels}:
        raise BundleError(
            "The bundle has no wheel of pilotfish: make it again with `pilotfish bundle`."
        )


def _copy(bundle: Path, path: str, target: Path, entry: manifest.Entry) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with manifest.reading(bundle, path, entry) as source, target.open("xb") as out:
        shutil.copyfileobj(source, out)
    target.chmod(entry.mode)


def parser() -> argparse.ArgumentParser:
    """Build the command line of ``python3 -m pilotfish.deploy.install``."""
    top = argparse.ArgumentParser(
        prog="python3 -m pilotfish.deploy.install",
        description="Installs a bundle into a root file system, or onto this system.",
    )
    top.add_argument("bundle", type=Path, nargs="?", help="folder that `pilotfish bundle` made")
    top.add_argument("--root", type=Path, default=Path("/"), help="root file system (default: /)")
    admission.add_arguments(top)
    action = top.add_mutually_exclusive_group()
    action.add_argument("--verify", action="store_true", help="only verify the bundle")
    action.add_argument("--rollback", action="store_true", help="restore the previous version")
    action.add_argument(
        "--uninstall", action="store_true", help="remove the installation, but keep /etc/pilotfish"
    )
    action.add_argument(
        "--check",
        action="store_true",
        help="compare the installed files with the record of the installation",
    )
    top.add_argument(
        "--purge", action="store_true", help="with --uninstall: remove settings and state, too"
    )
    return top


def run(args: argparse.Namespace, progress: Progress = _silent) -> int:
    """Execute the arguments; return the exit code. Raises `PilotfishError`."""
    root = Rootfs.inspect(args.root)
    if root.release is not None:
        say(f"{root.root}: {root.release}")
    here = Installation(root, say, progress)
    if args.rollback:
        here.roll_back()
    elif args.uninstall:
        here.uninstall(purge=args.purge)
    elif args.check:
        faults = here.check()
        for fault in faults:
            say(fault)
        return 1 if faults else 0
    elif args.bundle is None:
        raise InstallError("Name a bundle, or give one of --rollback, --uninstall and --check.")
    elif args.verify:
        here.verify(args.bundle, admission.policy_from_args(args))
    else:
        here.install(args.bundle, admission.policy_from_args(args))
    return 0


def say(line: str) -> None:
    """Print a line of progress; if stdout is closed, continue without output."""
    with suppress(BrokenPipeError):
        print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = parser().parse_args(arguments)
    return exit_code_of(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
