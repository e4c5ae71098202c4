"""The service over TLS: clients, renewed certificates, and strangers at the handshake."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pilotfish.base.errors import CertificateError
from pilotfish.cli import main
from pilotfish.device_runtime.service.connection import CONNECTIONS, TlsHandshake
from pilotfish.device_runtime.service.tls import tls_context
from tests.conftest import Pair
from tests.support.serving import Serving, chat, content_of, serving

DATA = Path(__file__).parents[2] / "data" / "tls"
KEY = "alice-0123456789abcdef"


def install(folder: Path, name: str, key: str | None = None) -> tuple[Path, Path]:
    """A certificate and a key where the service reads them."""
    certificate, private = folder / "tls.pem", folder / "tls.key"
    shutil.copyfile(DATA / f"{name}.pem", certificate)
    shutil.copyfile(DATA / f"{key or name}.key", private)
    private.chmod(0o600)
    return certificate, private


def trusting(*names: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for name in names:
        context.load_verify_locations(DATA / f"{name}.pem")
    return context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = tmp_path_factory.mktemp("tls")
    (result / "api-keys").write_text(f"alice:{KEY}\n")
    (result / "api-keys").chmod(0o600)
    return result


@pytest.fixture(scope="module")
def secured(long_pair: Pair, folder: Path) -> Iterator[Serving]:
    certificate, key = install(folder, "first")
    flags = ("--tls-cert", certificate, "--tls-key", key, "--api-keys", folder / "api-keys")
    with serving(long_pair.draft, None, *flags) as started:
        yield started


def client(service: Serving, name: str = "first") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{service.url}/v1",
        api_key=KEY,
        max_retries=0,
        http_client=httpx.Client(verify=trusting(name)),
    )


def display(service: Serving) -> bytes:
    """The certificate that a new connection gets."""
    context = trusting("first", "second")
    with (
        socket.create_connection(("127.0.0.1", service.port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        result = connection.getpeercert(binary_form=True)
    assert result is not None
    return result


def der(name: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert((DATA / f"{name}.pem").read_text())


def test_clients_are_answered_over_https(secured: Serving) -> None:
    assert secured.url.startswith("https://")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
    whole = chat(client(secured), **options).choices[0].message.content
    assert content_of(chat(client(secured), stream=True, **options)) == whole
    assert secured.get("/", verify=trusting("first")).status_code == 200
    header = {"Authorization": f"Bearer {KEY}"}
    assert secured.metric("pilotfish_", verify=trusting("first"), headers=header) > 0
    with pytest.raises(openai.APIConnectionError):
        chat(client(secured, "second"), **options)
    body = httpx.post(
        f"{secured.url}/v1/completions",
        json={"prompt": "a" * 500_000},
        headers=header,
        verify=trusting("first"),
    )
    assert body.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of old versions of TLS
def test_neither_clear_text_nor_old_versions(secured: Serving) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{secured.port}/health")
    old = trusting("first")
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError):
        secured.get("/health", verify=old)
    assert secured.get("/health", verify=trusting("first")).status_code == 200
    assert not any("Traceback" in line for line in secured.lines)


def test_handshakes_that_never_end_make_room(secured: Serving) -> None:
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", secured.port), timeout=30))
            for _ in range(CONNECTIONS + 20)
        ]
        began_s = time.monotonic()
        assert secured.get("/health", verify=trusting("first")).status_code == 200
        assert idle[0].recv(1) == b""  # the oldest
        assert time.monotonic() - began_s < 5
        assert idle[-1].recv(1) == b""  # and all after a while
        assert time.monotonic() - began_s < TlsHandshake.handshake_s + 5


def test_a_stranger_at_the_handshake_does_not_keep_a_service_from_its_end(
    pair: Pair, tmp_path: Path
) -> None:
    certificate, key = install(tmp_path, "first")
    flags = ("--tls-cert", certificate, "--tls-key", key)
    with (
        serving(pair.draft, None, *flags) as service,
        socket.create_connection(("127.0.0.1", service.port)),
    ):
        assert service.get("/health", verify=trusting("first")).status_code == 200
        began_s = time.monotonic()
        service.tell(signal.SIGTERM)
        assert service.process.wait(30) == 0
        assert time.monotonic() - began_s < 5


def test_a_certificate_is_renewed_while_an_answer_runs(secured: Serving, folder: Path) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 600}
    wanted = chat(client(secured), **options).choices[0].message.content
    chunks = chat(client(secured), stream=True, **options)
    got = [next(chunks) for _ in range(3)]
    install(folder, "second")
    secured.tell(signal.SIGHUP)
    secured.until("reloaded")
    assert display(secured) == der("second")
    assert content_of([*got, *chunks]) == wanted

    install(folder, "first", key="second")  # what does not go together changes nothing
    secured.tell(signal.SIGHUP)
    assert "is not the key" in secured.until("nothing was reloaded")
    assert display(secured) == der("second")
    install(folder, "first")
    secured.tell(signal.SIGHUP)
    secured.until("reloaded")
    assert display(secured) == der("first")


def test_a_certificate_that_will_not_do(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*flags: object) -> str:
        words = ["device", "serve", "--draft", str(pair.draft), "--listen", "127.0.0.1:0"]
        assert main([*words, *map(str, flags)]) == CertificateError.exit_code == 78
        return capsys.readouterr().err

    certificate, key = install(tmp_path, "first", key="second")
    both = ("--tls-cert", certificate, "--tls-key", key)
    assert "is not the key of" in refused(*both)
    assert "--tls-key" in refused("--tls-cert", certificate)
    assert "--tls-cert" in refused("--tls-key", key)
    assert "cannot be read" in refused("--tls-cert", tmp_path / "none", "--tls-key", key)
    install(tmp_path, "first", key="encrypted")
    assert "is encrypted" in refused(*both)
    key.write_text("no key")
    assert "PEM" in refused(*both)
    key.write_text("")
    assert "is empty" in refused(*both)
    install(tmp_path, "first")
    key.chmod(0o604)
    assert "chmod" in refused(*both)


def test_an_expired_certificate_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert tls_context(*install(tmp_path, "expired", key="first")) is not None
    assert "expired" in caplog.text
    caplog.clear()
    assert tls_context(*install(tmp_path, "first")) is not None
    assert not caplog.text
