"""Write configuration, keys and signers below ``/etc/pilotfish``.

A configuration file that was edited is never overwritten: the new file becomes ``NAME.new`` in the
same folder. The current version replaces an unedited file of an earlier version. Existing keys are
never replaced. Only bundles with a verified signature add signers. No signer is ever removed, and a
revoked signer stays revoked.

Standard library only: this runs on the board before anything is installed.
"""

import hashlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path

from pilotfish.deploy import files, manifest, signatures
from pilotfish.deploy.admission import AdmittedBundle
from pilotfish.deploy.manifest import BundleManifest, Entry
from pilotfish.deploy.rootfs import Rootfs, resolve
from pilotfish.deploy.signatures import Signers
from pilotfish.deploy.versions import Versions

FOLDER = "etc/pilotfish"
SIGNERS = f"{FOLDER}/signers"


def bring_configuration(root: Rootfs, versions: Versions, name: str) -> Iterator[str]:
    """Write a version's configuration; yield a sentence for each change."""
    ours = _shipped_digests(versions)
    for source in sorted((versions.folder(name) / "config").glob("*")):
        content = source.read_bytes()
        target = root.path(f"{FOLDER}/{source.name}")
        aside = target.with_name(f"{source.name}.new")
        there = target.read_bytes() if target.is_file() and not target.is_symlink() else None
        if target.is_symlink():
            yield f"{target} is a link and stays"
        elif there is None or _sha(there) in ours.get(source.name, set()):
            files.remove(aside)
            if files.put(target, content, 0o644 if there is None else _mode(target)):
                yield f"{target} written"
        elif there != content and files.put(aside, content):
            yield (
                f"{target} was edited and stays as it is; the new file is {aside.name} in "
                "the same folder"
            )


def bring_keys(root: Rootfs, bundle: Path, contents: BundleManifest) -> Iterator[str]:
    """Copy the bundle's keys that the root lacks; yield a sentence for each change."""
    for path, entry in contents.files.items():
        if not path.startswith("keys/"):
            continue
        target = root.path(f"{FOLDER}/{path}")
        content = _read(bundle, path, entry)
        if target.is_symlink():
            yield f"{target} is a link and stays"
        elif not target.exists():
            files.put(target, content, entry.mode)
            yield f"{target} written"
        elif target.read_bytes().strip() != content.strip():
            yield f"{target} is not the bundle's key, and stays as it is"


def bring_signers(root: Rootfs, bundle: Path, admitted: AdmittedBundle) -> Iterator[str]:
    """Add signers to the root's trusted ones; yield a sentence for each new one.

    A root without a folder of signers first gets the signers with which the bundle was admitted.
    Then the bundle's signers are added, since a trusted signer signed them. A bundle that was
    admitted without a signature adds none.
    """
    if admitted.signers is None:
        return
    folder = resolve(root.root, SIGNERS)
    if not folder.exists():
        _create_signers(folder, admitted.signers)
        for name in sorted(admitted.signers.trusted.values()):
            yield f"signer {name} is trusted by {folder}"
    there = Signers.load(folder)
    for path, entry in admitted.manifest.files.items():
        if not path.startswith("signers/"):
            continue
        key = signatures.parse_public(_read(bundle, path, entry), path)
        target = folder / Path(path).name
        if key in there.revoked:
            yield f"{path} is revoked in {folder}, and stays so"
        elif key not in there.trusted and target.exists():
            yield f"{target} is not the bundle's signer, and stays as it is"
        elif key not in there.trusted:
            files.put(target, signatures.public_file(key))
            yield f"signer {target.stem} is trusted by {folder}"


def _create_signers(folder: Path, signers: Signers) -> None:
    """Create a folder of signers in one step: once it exists, only its signers are trusted."""
    partial = folder.with_name(f".{folder.name}.pilotfish-partial")
    files.remove_tree(partial)
    files.folder(partial)
    for name, content in signers.files().items():
        files.put(partial / name, content)
    files.move(partial, folder)


def edited_files(root: Rootfs, versions: Versions, name: str) -> list[str]:
    """List the configuration files of a version that have been edited."""
    digests = _shipped_digests(versions)
    names = []
    for source in sorted((versions.folder(name) / "config").glob("*")):
        target = root.path(f"{FOLDER}/{source.name}")
        known = digests.get(source.name, set())
        if target.is_symlink() or (target.is_file() and _sha(target.read_bytes()) not in known):
            names.append(source.name)
    return names


def _shipped_digests(versions: Versions) -> dict[str, set[str]]:
    """Return, by name of a configuration file, its SHA-256s in all installed versions."""
    digests: dict[str, set[str]] = {}
    for name in versions.names():
        for path in (versions.folder(name) / "config").glob("*"):
            digests.setdefault(path.name, set()).add(manifest.hash_file(path))
    return digests


def _read(bundle: Path, path: str, entry: Entry) -> bytes:
    """Read a small file of a bundle."""
    content = io.BytesIO()
    with manifest.reading(bundle, path, entry) as source:
        shutil.copyfileobj(source, content)
    return content.getvalue()


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777
