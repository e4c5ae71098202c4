"""Sign and verify bundles with OpenSSH (`ssh-keygen -Y`), Ed25519 keys and our own namespace.

    signer.key                     a secret key, readable by its owner only (`pilotfish keys new`)
    signers/signer.pub             its public key; the folder can be used as a list of signers
    /etc/pilotfish/signers         signers that a board trusts; also the flashing machine's default:
        NAME.pub                   a public key of OpenSSH, one per file
        NAME.revoked               a key that is never trusted again
    manifest.json.sig              in a bundle: the signature of its manifest's bytes

In:  a manifest's bytes and its signature. Out: the name of the trusted signer, or an error.
Guarantee: only signatures that `ssh-keygen` verifies for one trusted Ed25519 key pass. An
unreadable `.pub` file is skipped; an unreadable `.revoked` file is an error, since the key that it
revokes is unknown.

Standard library only: this runs on the board before anything is installed.
"""

import base64
import binascii
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotfish.base.errors import KeysError
from pilotfish.base.reading import without_bom
from pilotfish.deploy import files
from pilotfish.deploy.errors import SignatureError

SIGNER = "signer"
NAMESPACE = "pilotfish-bundle"
FOLDER = Path("/etc/pilotfish/signers")
NAME = "manifest.json.sig"
MAX_BYTES = 4096  # maximum size of a public key's file and of a signature, bytes
_KIND = b"ssh-ed25519"
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_MAGIC = b"SSHSIG\0\0\0\1"  # preamble and version (OpenSSH, PROTOCOL.sshsig)


@dataclass(frozen=True)
class Signers:
    """The keys of a folder of signers.
    trusted: raw public key → signer's name. revoked: raw public key → name of its file. faults: a
    sentence for each file that could not be read as a key.
    """

    folder: Path
    trusted: Mapping[bytes, str]
    revoked: Mapping[bytes, str]
    faults: Sequence[str]

    @classmethod
    def load(cls, folder: Path) -> "Signers":
        """Read a folder of signers; `KeysError` if it is missing or cannot be trusted."""
        try:
            names = sorted(os.listdir(folder))
            open_to_all = folder.stat().st_mode & stat.S_IWOTH
        except OSError as error:
            raise KeysError(
                f"The signers in {folder} cannot be read ({error.strerror}): put the .pub "
                "files of the signers that you trust there, or name their folder with "
                "--signers."
            ) from error
        if open_to_all:
            raise KeysError(f"Every user may write to {folder}: run `chmod o-w {folder}`.")
        # in any case, since some file systems have capital letters only
        ended = [name for name in names if name.lower().endswith(".revoked")]
        revoked = {read_public(folder / name): name for name in ended}
        trusted: dict[bytes, str] = {}
        faults = []
        for name in names:
            if name.endswith(".pub"):
                try:
                    key = read_public(folder / name)
                except KeysError as error:
                    faults.append(str(error))
                else:
                    if key not in revoked:
                        trusted[key] = name.removesuffix(".pub")
        return cls(folder, trusted, revoked, faults)

    def files(self) -> dict[str, bytes]:
        """Return name → content of the files of a folder that trusts and revokes the same keys."""
        trusted = {f"{name}.pub": key for key, name in self.trusted.items()}
        revoked = {name: key for key, name in self.revoked.items()}
        return {name: public_file(key) for name, key in (trusted | revoked).items()}

    def verify(self, content: bytes, signature: bytes) -> str:
        """Return the name of the trusted signer; `SignatureError` for any other signature."""
        key, namespace = _opened(signature)
        if namespace != NAMESPACE.encode():
            raise SignatureError(
                f"The bundle's signature is for {namespace.decode(errors='replace')!r}, not for "
                f"{NAMESPACE!r}: sign it with `pilotfish bundle --sign`."
            )
        if key in self.revoked:
            raise SignatureError(
                f"The bundle is signed with a revoked key ({self.folder / self.revoked[key]}): "
                "have the bundle signed with another key."
            )
        if key not in self.trusted:
            raise SignatureError(
                f"The bundle is signed by {fingerprint(key)}, which is not among the "
                f"{len(self.trusted)} trusted signers in {self.folder}: if you trust that "
                "signer, put its .pub file there."
            )
        with tempfile.TemporaryDirectory() as scratch:
            allowed, signed = Path(scratch, "allowed"), Path(scratch, "signature")
            allowed.write_bytes(f'{SIGNER} namespaces="{NAMESPACE}" '.encode() + public_file(key))
            signed.write_bytes(signature)
            done = _keygen(
                *("-Y", "verify", "-n", NAMESPACE, "-I", SIGNER, "-f", allowed, "-s", signed),
                stdin=content,
            )
        if done.returncode != 0:
            raise SignatureError(
                f"The bundle was changed since {self.trusted[key]} signed it: copy it again from "
                f"where it was made. (ssh-keygen says: {_last_line(done)}.)"
            )
        return self.trusted[key]


def create(directory: Path) -> Path:
    """Make a signer's key pair in a key folder; return the public file. Never overwrites a file."""
    secret, public = directory / f"{SIGNER}.key", directory / "signers" / f"{SIGNER}.pub"
    for path in (secret, public):
        if os.path.lexists(path):
            raise KeysError(f"{path} exists already; to replace it, remove it first.")
    with tempfile.TemporaryDirectory() as scratch:
        pair = Path(scratch) / SIGNER
        done = _keygen("-q", "-t", "ed25519", "-N", "", "-C", "", "-f", pair)
        if done.returncode != 0:
            raise KeysError(f"ssh-keygen could not make the key: {_last_line(done)}.")
        key = read_public(pair.with_suffix(".pub"))
        try:
            files.folder(directory, 0o700)
            files.put(secret, pair.read_bytes(), 0o600)
            files.put(public, public_file(key))
        except OSError as error:
            raise KeysError(f"{secret} cannot be written: {error.strerror}.") from error
    return public


def listing(directory: Path) -> list[dict[str, str]]:
    """List the signers of a key folder, as `wire.keys.listing` does; kind: ``signer``."""
    folder = directory / "signers"
    if not folder.exists():
        return []
    there = Signers.load(folder)
    names = {name: key for key, name in there.trusted.items()}
    names |= {name: key for key, name in there.revoked.items()}
    return [
        {"name": name, "kind": SIGNER, "public": public_file(key).decode().strip()}
        for name, key in sorted(names.items())
    ]


def require_secret(secret: Path) -> None:
    """Raise `KeysError` unless only its owner can read the secret key, and ssh-keygen exists."""
    try:
        mode = secret.stat().st_mode
    except OSError as error:
        raise KeysError(
            f"{secret} cannot be read ({error.strerror}): make a signer's key with "
            "`pilotfish keys new signer`."
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeysError(f"{secret} is open to other users: run `chmod 600 {secret}`.")
    _tool()


def sign(content: bytes, secret: Path) -> bytes:
    """Sign ``content`` with a secret key; ssh-keygen may ask for its passphrase."""
    require_secret(secret)
    done = _keygen("-Y", "sign", "-q", "-n", NAMESPACE, "-f", secret, stdin=content)
    if done.returncode != 0:
        raise KeysError(f"The bundle could not be signed with {secret}: {_last_line(done)}.")
    try:
        _opened(done.stdout)
    except SignatureError as error:
        raise KeysError(
            f"{secret} is not an Ed25519 key: make one with `pilotfish keys new signer`."
        ) from error
    return done.stdout


def read_public(path: Path) -> bytes:
    """Read the raw key of a one-line file, ``ssh-ed25519 BASE64 COMMENT``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            content = file.read(MAX_BYTES + 1) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}.") from error
    if mode & stat.S_IWOTH:
        raise KeysError(f"Every user may write to {path}: run `chmod o-w {path}`.")
    return parse_public(content, str(path))


def parse_public(content: bytes, what: str) -> bytes:
    """Parse the raw key from the bytes of a public key's file; errors call the file ``what``."""
    lines = without_bom(content).strip().splitlines()
    words = lines[0].split() if len(lines) == 1 and len(content) <= MAX_BYTES else []
    if len(words) >= 2 and words[0] == _KIND:
        try:
            return _raw(base64.b64decode(words[1], validate=True))
        except (binascii.Error, ValueError):
            pass
    raise KeysError(
        f"{what} does not contain a signer's key: the file must be one line that "
        "begins with ssh-ed25519."
    )


def public_file(key: bytes) -> bytes:
    """Format a public key's file; a line of OpenSSH's ``allowed_signers`` ends in the same way."""
    return _KIND + b" " + base64.b64encode(_blob(key)) + b"\n"


def fingerprint(key: bytes) -> str:
    """Format a key's fingerprint as `ssh-keygen -l` does."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(_blob(key)).digest()).decode().rstrip("=")


def _blob(key: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in (_KIND, key))


def _raw(blob: bytes) -> bytes:
    """Return the 32 bytes of an Ed25519 key as SSH writes it; ValueError for anything else."""
    key = blob[-32:]
    if _blob(key) != blob:
        raise ValueError("not an Ed25519 key")
    return key


def _opened(signature: bytes) -> tuple[bytes, bytes]:
    """Return the raw public key and the namespace that a signature names; verifies nothing."""
    try:
        begin, *lines, end = signature.decode("ascii").strip().splitlines()
        blob = base64.b64decode("".join(lines), validate=True)
        if begin != _BEGIN or end != _END or not blob.startswith(_MAGIC):
            raise ValueError("no signature")
        rest = blob[len(_MAGIC) :]
        parts = []
        for _ in range(2):
            size = int.from_bytes(rest[:4], "big")
            parts.append(rest[4 : 4 + size])
            rest = rest[4 + size :]
        return _raw(parts[0]), parts[1]
    except ValueError as error:
        raise SignatureError(
            f"{NAME} of the bundle is not a signature by an Ed25519 key: have the bundle "
            "signed again."
        ) from error


def _tool() -> str:
    path = shutil.which("ssh-keygen")
    if path is None:
        raise SignatureError(
            "The command ssh-keygen, which signs and verifies bundles, is missing on this "
            "machine: install the package openssh-client."
        )
    return path


def _keygen(*arguments: object, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    command = [_tool(), *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, input=stdin)


def _last_line(done: "subprocess.CompletedProcess[bytes]") -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace").splitlines()
    return lines[-1].strip().rstrip(".") if lines else "no reason was given"
