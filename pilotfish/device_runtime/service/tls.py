"""Load the service's TLS certificate and key, and check both before serving."""

import logging
import os
import ssl
import stat
from pathlib import Path

from pilotfish.base.errors import CertificateError

_log = logging.getLogger("pilotfish.service")
_NOT_YET_VALID, _EXPIRED = 9, 10  # OpenSSL's X509_V_ERR_…


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Load a context for TLS 1.2 or later; None without files.

    certificate: PEM file of the service's certificate, followed by the certificates of intermediate
    authorities. key: PEM file, not encrypted, not readable by every user. Raises
    `CertificateError`.
    """
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise CertificateError("TLS needs two files: name both with --tls-cert and --tls-key.")
    for path in (certificate, key):
        _check_readable(path)
    if key.stat().st_mode & stat.S_IRWXO:
        raise CertificateError(
            f"{key} is open to every user of this machine: run `chmod o= {key}`."
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def password() -> str:  # otherwise OpenSSL asks for a passphrase at the terminal
        raise CertificateError(
            f"{key} is encrypted, and a service has no terminal to ask for its password: "
            f"write the key without a password (`openssl pkey -in {key} -out NEW`)."
        )

    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateError(f"{key} is not the key of {certificate}.") from None
        raise CertificateError(
            f"{certificate} and {key} are not a certificate and a key in PEM: "
            f"{error.reason or error}."
        ) from None
    _warn_of_dates(context, certificate)
    return context


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise CertificateError(f"{path} is empty.")
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}.") from None


def _warn_of_dates(context: ssl.SSLContext, certificate: Path) -> None:
    """Log a warning if the certificate is not valid today.

    This is no error, since a board's clock may not be set yet.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certificate)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(down, up)
    server = context.wrap_bio(up, down, server_side=True)
    for end in (client, server, client):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
                _log.warning("%s: %s; clients will refuse it", certificate, error.verify_message)
            return
        except ssl.SSLError:
            return  # clients may accept the certificate nevertheless
