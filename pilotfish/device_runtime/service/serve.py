"""Start the service: read keys and certificate, bind the address, load the drafter, then serve.

Faults of the configuration are reported before anything is loaded. The HTTP modules are imported
while the drafter loads, since both take about the same time.
"""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pilotfish.base.errors import ListenError
from pilotfish.base.supervisor import Supervisor
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.device_config import ServiceConfig
from pilotfish.device_runtime.draft_source import DraftSource
from pilotfish.device_runtime.record import Round
from pilotfish.device_runtime.service.access import Access, api_keys, warn_of_pages
from pilotfish.device_runtime.service.lanes import open_beside
from pilotfish.device_runtime.service.tls import tls_context
from pilotfish.device_runtime.texts.text_memory import OFF
from pilotfish.engines.inspection import Inspection
from pilotfish.wire.transport import is_loopback

_log = logging.getLogger("pilotfish.service")

_SEND_BUFFER_BYTES = 64 * 1024  # socket's send buffer: limits unread data per client


def serve(
    config: ServiceConfig,
    *,
    reread: Callable[[], ServiceConfig] | None = None,
    announce: Callable[[str], None] = lambda address: None,
    await_edge: Callable[[], None] = lambda: None,
    lifeline: int | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, or until ``lifeline`` is readable; return the exit code.

    reread: reads the configuration again, at SIGHUP. announce: called with ``http(s)://HOST:PORT``
    once requests are accepted. await_edge: called when the drafter is loaded, before requests are
    accepted. lifeline: a descriptor that is readable once the service has nothing
    left to serve: its edge has ended and will not come back.
    """
    supervisor = Supervisor.from_environment()
    where = _host_and_port(config.listen)
    source = DraftSource.open(
        config.draft, text=config.draft_text, text_location=config.texts, shared=config.share_texts
    )
    inspection = Inspection(source.artifact)
    access = Access(api_keys(config.api_keys, config.listen), config.allow_origin)
    warn_of_pages(access)
    nobodys = access.keys is None and not config.share_texts
    if nobodys and config.texts is not None and str(config.texts) != OFF:
        _log.warning(
            "without API keys texts have no owner, so no texts are kept in %s: name a file of API "
            "keys (--api-keys), or share texts (--share-texts)",
            config.texts,
        )
    tls = tls_context(config.tls_cert, config.tls_key)
    if tls is None and not is_loopback(f"tcp://{config.listen}"):
        _log.warning(
            "API keys and conversations cross the network in clear text: name a certificate "
            "(--tls-cert, --tls-key), or listen on loopback behind a proxy that has one"
        )
    rounds: list[Callable[[Round], None]] = []

    def on_round(record: Round) -> None:
        for tell in rounds:
            tell(record)

    with (
        contextlib.closing(inspection),
        _listening(*where, locked=access.keys is not None) as listener,
        ThreadPoolExecutor(1) as loader,
    ):
        loading = loader.submit(_devices, config, on_round)
        from pilotfish.device_runtime.service.service_daemon import ServiceDaemon

        devices = loading.result()
        await_edge()
        daemon = ServiceDaemon(
            config, source.name, devices, access, supervisor, reread, inspection, tls
        )
        rounds += [daemon.metrics.add_round, daemon.status.add_round]
        gc.collect()
        gc.freeze()  # exempt loaded objects, which stay, from garbage collection between rounds
        return asyncio.run(daemon.run(listener, announce, lifeline))


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ListenError(f"{address!r} is not an address to listen on; write HOST:PORT.")
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _listening(host: str, port: int, *, locked: bool) -> Iterator[socket.socket]:
    """Bind a socket to this address. locked: whether there are API keys."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = addresses[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"The service cannot listen on {host}: {error.strerror}.") from error
    with listener:
        # checked here, since "localhost" may resolve to an address that is not loopback
        if not locked and not ipaddress.ip_address(where[0]).is_loopback:
            raise ListenError(f"{host} is not a loopback address, and there are no API keys.")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        try:
            listener.bind(where)
        except OSError as error:
            raise ListenError(
                f"The service cannot listen on {host}:{port}: {error.strerror}."
            ) from error
        yield listener


def _devices(config: ServiceConfig, on_round: Callable[[Round], None]) -> list[Device]:
    """Open one device per lane, all with the same weights."""
    first = Device(
        config.draft,
        config.edge,
        config.keys,
        provider=config.provider,
        threads=config.threads,
        context=config.context,
        on_round=on_round,
        lanes=config.lanes,
        on_link_loss=config.on_link_loss,
        patience_s=config.patience_s,
        draft_text=config.draft_text,
        texts=config.texts,
        share_texts=config.share_texts,
        traces=config.traces,
    )
    return open_beside(first, config.lanes)
