"""Control access: clients need an API key; without keys only this machine's programs have access.

A key file has one key per line, ``NAME:KEY`` or ``KEY``. Empty lines and lines that begin with #
are skipped. Keys are stored as SHA-256 digests; a check compares all digests, so that its
duration reveals nothing.

Without keys a service listens on loopback only. There a browser is the danger: a foreign page can
send requests to 127.0.0.1 (CSRF), or resolve its own name to it (DNS rebinding). So the Host must
be this machine, and the Origin, if present, the service itself or one that the operator allows.

Pages of an allowed origin may also read the answers (CORS). They get no cookies or other
credentials of the browser: a page sends its key itself.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pilotfish.base.errors import KeysError, ListenError
from pilotfish.base.reading import without_bom
from pilotfish.device_runtime.service.field_check import IGNORED_HEADER
from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.drafting.lookup import Owner
from pilotfish.wire.transport import is_loopback

_log = logging.getLogger("pilotfish.service")

_FILE_BYTES = 256 * 1024
_KEY = re.compile(r"[\x21-\x7e]{16,512}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
CREDENTIAL = "api-keys"
PREFLIGHT = "access-control-request-method"  # header of a preflight request
ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+")
_HEADERS = re.compile(r"[A-Za-z0-9-]+(, ?[A-Za-z0-9-]+){0,63}")
_OWN_HEADERS = "authorization, content-type"


class Client(NamedTuple):
    """The client of a request.

    name: the key's name, or the address. owner: the owner of the conversation; None without a key.
    The owner is derived from the key, since a name may pass to another key.
    """

    name: str
    owner: Owner = None

    @property
    def identity(self) -> str:
        """The string that identifies this client: the owner if known, else the name."""
        return self.owner or self.name


class ApiKeys:
    """The API keys of a service.

    digests: name of the client → SHA-256 of its key. broken: faults of the key file, as
    sentences without keys.
    """

    def __init__(self, digests: Mapping[str, bytes], broken: Sequence[str] = ()) -> None:
        self._digests = dict(digests)
        self.broken = tuple(broken)

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Read a key file; `KeysError` for any faulty line."""
        keys = cls.load_valid_lines(path)
        if keys.broken:
            raise KeysError(keys.broken[0])
        return keys

    @classmethod
    def load_valid_lines(cls, path: Path) -> ApiKeys:
        """Read the keys of a file's valid lines; the result may have no key.

        Raises `KeysError` only if the file as a whole cannot be read.
        """
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = without_bom(file.read(_FILE_BYTES + 1))
        except OSError as error:
            raise KeysError(f"{path} cannot be read: {error.strerror}.") from error
        if mode & stat.S_IRWXO:
            raise KeysError(f"{path} is open to every user of this machine: run `chmod o= {path}`.")
        if len(text) > _FILE_BYTES:
            raise KeysError(f"{path} is longer than {_FILE_BYTES:,} bytes.")
        digests: dict[str, bytes] = {}
        broken = []
        for number, line in enumerate(text.decode("utf-8", "replace").splitlines(), 1):
            line = line.strip()
            if line and not line.startswith("#"):
                try:
                    name, key = _entry(line, f"{path}, line {number}")
                except KeysError as error:
                    broken.append(str(error))
                    continue
                if name in digests:
                    broken.append(f"{path}, line {number}: the name {name!r} already has a key.")
                digests.setdefault(name, _digest(key))
        if not digests and not broken:
            broken.append(f"{path} holds no key: write one key per line, as NAME:KEY.")
        return cls(digests, broken)

    def __len__(self) -> int:
        return len(self._digests)

    def client(self, authorization: str | None) -> Client | None:
        """Return the client with the key in this ``Authorization`` header."""
        scheme, _, key = (authorization or "").partition(" ")
        return self.client_of_key(key) if scheme.lower() == "bearer" else None

    def client_of_key(self, key: str) -> Client | None:
        """Return the client with this key."""
        digest = _digest(key.strip())
        match = None
        for name, known in self._digests.items():
            if hmac.compare_digest(known, digest):
                match = Client(name, digest.hex())
        return match


def _entry(line: str, where: str) -> tuple[str, str]:
    name, colon, key = line.partition(":")
    if not colon:
        # a part of the digest, since a client's name must not reveal the key
        name, key = f"key-{_digest(line).hex()[:8]}", line
    if not _NAME.fullmatch(name):
        raise KeysError(
            f"{where}: a name may have only letters, digits, dots, dashes and underscores."
        )
    if not _KEY.fullmatch(key):
        raise KeysError(
            f"{where}: a key must have 16 to 512 characters without spaces, for example from "
            "`openssl rand -hex 24`."
        )
    return name, key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def api_keys(
    named: Path | None, listen: str, read: Callable[[Path], ApiKeys] = ApiKeys.load
) -> ApiKeys | None:
    """Read the keys from systemd's credentials, else from ``named``; None without either.

    Raises `KeysError` as ``read`` does, and `ListenError` if a service on ``listen``
    (``HOST:PORT``) needs keys.
    """
    path = named
    handed = os.environ.get("CREDENTIALS_DIRECTORY")
    if handed and (Path(handed) / CREDENTIAL).exists():
        path = Path(handed) / CREDENTIAL
    if path is not None:
        return read(path)
    if not is_loopback(f"tcp://{listen}"):
        raise ListenError(
            f"Without API keys the service listens on loopback only, not on {listen}. Write a "
            "file with one key per line (NAME:KEY), and name the file with --api-keys."
        )
    return None


class Access:
    """Access control of requests. ``keys`` and ``origins`` may be replaced while requests run.

    origins: the allowed origins of foreign pages (`checked_origins`).
    """

    def __init__(self, keys: ApiKeys | None, origins: Sequence[str] = ()) -> None:
        self.keys = keys
        self.origins = checked_origins(origins)

    @property
    def is_open_to_pages(self) -> bool:
        """Whether every page in this machine's browsers may use the service."""
        return self.keys is None and ANY_ORIGIN in self.origins

    def allows(self, origin: str) -> bool:
        """Whether a foreign page of this origin may use the service."""
        return ANY_ORIGIN in self.origins or origin.lower() in self.origins

    def cors_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers that let the page that sent this request read the answer."""
        origin = headers.get("origin")
        if origin is None or not self.allows(origin):
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": f"retry-after, {IGNORED_HEADER}",
            "vary": "origin",
        }

    def client(self, headers: Mapping[str, str], peer: str, *, needs_key: bool) -> Client:
        """Return the client, by its key or its address, or raise a `RefusalError`.

        headers: names in lower case. needs_key: False for public routes.
        """
        if self.keys is None:
            self._check_own(headers)
            return Client(peer)
        client = self.keys.client(headers.get("authorization"))
        if client is None and (key := headers.get("x-api-key")) is not None:  # as at Anthropic
            client = self.keys.client_of_key(key)
        if client is not None:
            return client
        if not needs_key:
            return Client(peer)
        raise RefusalError(
            401,
            "This service requires an API key: send it as `Authorization: Bearer KEY`, or as "
            "`x-api-key: KEY`.",
            code="invalid_api_key",
            reason="key",
            close=True,
        )

    def _check_own(self, headers: Mapping[str, str]) -> None:
        """Refuse requests that a browser sends on behalf of a foreign page."""
        host = headers.get("host", "")
        if host and not is_loopback(f"http://{host}"):
            raise _foreign("Host", host)
        origin = headers.get("origin")
        if origin is None or origin.partition("://")[2].lower() == host.lower():
            return
        if not self.allows(origin):
            raise _foreign("Origin", origin)


def warn_of_pages(access: Access) -> None:
    """Log a warning if every page may use the service."""
    if access.is_open_to_pages:
        _log.warning(
            "without API keys and with --allow-origin %s every page in this machine's browsers can "
            "use the service",
            ANY_ORIGIN,
        )


def checked_origins(origins: Sequence[str]) -> frozenset[str]:
    """Return the origins as browsers write them; `ListenError` for anything else."""
    for origin in origins:
        if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin.lower()):
            raise ListenError(
                f"{origin!r} is not an origin: write SCHEME://HOST or SCHEME://HOST:PORT as the "
                "browser sends it, without a path, or * for all origins."
            )
    return frozenset(origin.lower() for origin in origins)


def preflight_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of the answer to a preflight request of an allowed page."""
    header_names = headers.get("access-control-request-headers", "")
    allowed = {
        "access-control-allow-methods": "GET, HEAD, POST, DELETE",
        "access-control-allow-headers": header_names
        if _HEADERS.fullmatch(header_names)
        else _OWN_HEADERS,
        "access-control-max-age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        allowed["access-control-allow-private-network"] = "true"
    return allowed


def _foreign(name: str, value: str) -> RefusalError:
    return RefusalError(
        403,
        f"{name} {value[:100]!r} is not this machine: without API keys this service answers only "
        "programs that run on this machine and use a loopback name for it, and pages of the "
        "origins that --allow-origin names.",
        code="foreign_origin",
        reason="foreign",
        close=True,
    )
