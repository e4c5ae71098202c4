"""Run the service: handle signals and reloads, feed the watchdog, and stop.

SIGTERM and SIGINT drain: new requests are refused, and running answers may end within a time limit.
SIGHUP reads keys and configuration again while answers run. After any fault everything stays as it
was, except that API keys removed from their file are revoked. The serving loop feeds the watchdog
while every busy lane shows signs of life.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from msgspec.structs import replace
from starlette.types import ASGIApp

from pilotfish.base.errors import CertificateError, PilotfishError
from pilotfish.base.settings import fixed_changes, with_live_changes
from pilotfish.base.supervisor import Supervisor, summarize
from pilotfish.base.terminal import Terminal
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.device_config import ServiceConfig
from pilotfish.device_runtime.record import Generation
from pilotfish.device_runtime.service.acceptor import Acceptor
from pilotfish.device_runtime.service.access import (
    Access,
    ApiKeys,
    api_keys,
    checked_origins,
    warn_of_pages,
)
from pilotfish.device_runtime.service.app import application
from pilotfish.device_runtime.service.connection import (
    CONNECTIONS,
    HEAD_S,
    Connection,
    TlsConfig,
    TlsHandshake,
)
from pilotfish.device_runtime.service.device_service import DeviceService
from pilotfish.device_runtime.service.lanes import Lanes
from pilotfish.device_runtime.service.service_metrics import ServiceMetrics
from pilotfish.device_runtime.service.status import ServiceStatus
from pilotfish.device_runtime.service.tls import tls_context
from pilotfish.engines.inspection import Inspection
from pilotfish.wire.keys import DeviceKeys

_log = logging.getLogger("pilotfish.service")

_TICK_S = 1.0
_HEAD_BYTES = 32 * 1024
_BACKLOG = 128
# Headers of all responses: browsers must not guess types, and foreign pages may not embed
# responses.
_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
]
_SOFTWARE = 70  # exit code EX_SOFTWARE of sysexits.h
_END_S = 10.0  # time for interrupted answers to end
_TROUBLE = (PilotfishError, OSError)  # errors that reading keys or configuration may raise

Reread = Callable[[], ServiceConfig]


class ServiceDaemon:
    """The service's daemon on its serving loop."""

    def __init__(
        self,
        config: ServiceConfig,
        drafter: str,
        devices: list[Device],
        access: Access,
        supervisor: Supervisor,
        reread: Reread | None,
        inspection: Inspection,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._config = config
        self._devices = devices
        self._access = access
        self._started = f"serving {drafter}"  # beginning of the log line at the start
        execution = devices[0].execution
        if execution is not None:
            self._started += f": {execution}"
        self._gpu_idle = execution is not None and execution.idle_gpu is not None
        self.metrics = ServiceMetrics(drafter=drafter, execution=execution)
        self.status = ServiceStatus(
            drafter=drafter,
            lanes=len(devices),
            energy=self.metrics.energy,
            misfits=devices[0].misfits,
        )
        self._supervisor = supervisor
        self._reread = reread
        self._inspection = inspection
        self._tls = tls
        self._edge = _edge_of(config)
        self._protocol = "none yet"
        self._trouble = ""  # faults of the last reload; "": none
        self._code = 0
        self._stopping = False
        self._terminal = Terminal()

    async def run(
        self, listener: socket.socket, announce: Callable[[str], None], lifeline: int | None
    ) -> int:
        """Serve on this socket until a signal; see `serve`. Returns the exit code."""
        self._lanes = Lanes(
            self._devices,
            places=self._config.queue,
            on_generation=self._note_generation,
            on_counts=self._note_queue,
        )
        self._service = DeviceService(
            self._config, self._lanes, self._access, self.metrics, self.status, self._inspection
        )
        http = _uvicorn(application(self._service), self._config.drain_s)
        http.tls = self._tls
        self._http, self._server = http, _Server(http)
        serving = asyncio.ensure_future(self._server.serve([listener]))
        ticking = asyncio.ensure_future(self._tick())
        ticking.add_done_callback(self._tick_failed)
        try:
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.005)
            self._obey_signals()
            if lifeline is not None:
                asyncio.get_running_loop().add_reader(lifeline, self._stop_at_once, lifeline)
            host, port = listener.getsockname()[:2]
            self._supervisor.ready(self._line())
            self._inspection.start()
            scheme = "https" if self._tls else "http"
            where = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
            announce(where)
            _log.info("%s; on %s; %s", self._started, where, self._keys_in_use)
            await serving
        finally:
            ticking.cancel()
            self._service.close()
            self._lanes.interrupt()
            ended = await asyncio.to_thread(self._lanes.close, _END_S)
            if not ended:
                _log.error("a lane hangs and is abandoned")
            self.metrics.close()
        return self._code

    # Signals

    def _obey_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _stop(self, number: signal.Signals) -> None:
        """Drain at the first signal; interrupt the answers at the second."""
        if self._stopping:
            self._lanes.interrupt()
            return
        self._stopping = True
        self._code = 0 if number == signal.SIGTERM else 128 + number
        drain_s = self._config.drain_s
        self._supervisor.stopping(f"Draining: {self._lanes.running} running answers may end")
        self._supervisor.extend(drain_s + 2 * _END_S)
        self._lanes.refuse_waiting()
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(drain_s, self._lanes.interrupt)

    def _stop_at_once(self, lifeline: int) -> None:
        """Stop and interrupt the answers: the other end of the lifeline has ended."""
        asyncio.get_running_loop().remove_reader(lifeline)
        self._stop(signal.SIGTERM)
        self._lanes.interrupt()

    def _reload(self) -> None:
        """Read keys and configuration again, or stop if the terminal was closed.

        After any fault everything stays as it was, except that removed API keys are revoked.
        """
        if self._terminal.closed:
            self._stop(signal.SIGHUP)
            return
        self._supervisor.reloading()
        troubles: list[str] = []
        config = self._config
        try:
            config = self._reread() if self._reread is not None else config
        except _TROUBLE as error:
            troubles.append(str(error))
        sound = self._reload_keys(config, troubles)
        try:
            if not troubles:
                self._adopt(config)
        except _TROUBLE as error:
            troubles.append(str(error))
        warn_of_pages(self._access)
        for trouble in troubles:
            besides = " except the API keys" if sound else ""
            _log.error("nothing was reloaded%s: %s", besides, trouble)
        self._trouble = summarize(troubles)
        self._supervisor.reloaded(self._line(), self._trouble)

    def _reload_keys(self, config: ServiceConfig, troubles: list[str]) -> bool:
        """Read the API keys again; return whether there is a key file and it was read."""
        try:
            # a reload does not change the address
            keys = api_keys(config.api_keys, self._config.listen, ApiKeys.load_valid_lines)
        except _TROUBLE as error:  # the file's keys are unknown: keep all keys
            troubles.append(str(error))
            current = self._config
            return config.api_keys != current.api_keys and self._reload_keys(current, troubles)
        self._access.keys = keys
        # adopted even after other faults: the next reload must not read the earlier file again
        self._config = replace(self._config, api_keys=config.api_keys)
        troubles += () if keys is None else keys.broken
        return keys is not None

    def _certificate(self, config: ServiceConfig) -> ssl.SSLContext | None:
        """Load the certificate for later connections.

        Raises `CertificateError` if TLS would begin or end, which needs a restart.
        """
        tls = tls_context(config.tls_cert, config.tls_key)
        if (tls is None) != (self._tls is None):
            raise CertificateError("restart the service to begin or to end the use of TLS.")
        return tls

    def _adopt(self, config: ServiceConfig) -> None:
        before = self._config
        tls = self._certificate(config)
        origins = checked_origins(config.allow_origin)
        edge = _edge_of(config)
        if edge != self._edge and config.edge is not None:
            self._devices[0].redirect(config.edge, config.keys)  # all devices share its link
        self._devices[0].retry()
        self._http.tls, self._edge, self._access.origins = tls, edge, origins
        if fixed := fixed_changes(before, config):
            _log.warning("restart the service to apply the changes of: %s", ", ".join(fixed))
        self._config = with_live_changes(before, config)
        self._service.config = self._config
        _log.info("reloaded")

    # Reports

    async def _tick(self) -> None:
        feed_s = self._supervisor.feed_s
        pause_s = _TICK_S if feed_s is None else min(_TICK_S, feed_s / 2)
        while True:
            self._service.responses.expire()
            link, readings = self._service.link_status, self._service.link_state
            self.metrics.set_link(link, readings)
            self.status.set_link(link, readings)
            self.metrics.set_inspection(self._inspection)
            self._look_at_connections()
            stuck = self._service.stuck()
            if stuck:
                _log.error("lanes that show no sign of life: %s", stuck)
            else:
                self._supervisor.feed()
            if not self._stopping:
                self._supervisor.status(self._line())
            await asyncio.sleep(pause_s)

    def _look_at_connections(self) -> None:
        if not self._server.started:
            return
        acceptor = self._server.acceptor
        acceptor.check_room()
        number = len(self._server.server_state.connections)
        self.metrics.set_connections(number, acceptor.crowded, acceptor.turned_away)
        self.status.set_connections(number, acceptor.crowded)

    def _tick_failed(self, ticking: "asyncio.Future[None]") -> None:
        """Log the error that ended `_tick`, and stop, so that systemd starts the service again."""
        if not ticking.cancelled() and (error := ticking.exception()) is not None:
            _log.error("the service's periodic check failed", exc_info=error)
            self._code = _SOFTWARE
            self._server.should_exit = True

    def _line(self) -> str:
        if self._inspection.damage:
            return f"No request is answered: {self._inspection.damage}"
        lanes = self._lanes
        where = "no edge"
        if (link := self._service.link_status) is not None:
            mend = f" ({link.remedy})" if link.remedy else ""
            where = f"edge at {self._config.edge}: {link.state.value}{mend}"
        crowded = self._server.started and self._server.acceptor.crowded
        return (
            f"{lanes.running} of {len(lanes.lanes)} lanes busy, {max(0, lanes.waiting)} waiting; "
            f"{where}; last protocol: {self._protocol}"
            f"{'; the GPU is idle' if self._gpu_idle else ''}"
            f"{'; no room for more connections' if crowded else ''}"
            f"{f'; not in force: {self._trouble}' if self._trouble else ''}"
        )

    @property
    def _keys_in_use(self) -> str:
        """Return the part of the start's log line about the edge and the keys."""
        clients = (
            "no API keys" if self._access.keys is None else f"{len(self._access.keys)} API keys"
        )
        edge, keys = self._edge
        if edge is None:
            return f"no edge; {clients}"
        link = (
            "without keys"
            if keys is None
            else (f"device.pub {keys.public.decode()}, edge.pub {keys.edge.decode()}")
        )
        return f"edge {edge}, {link}; {clients}"

    def _note_generation(self, generation: Generation) -> None:
        self._protocol = generation.protocol
        self.metrics.add_generation(generation)
        self.status.add_generation(generation)

    def _note_queue(self, waiting: int, running: int) -> None:
        self.metrics.set_queue(waiting, running)
        self.status.set_queue(waiting, running)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers and its listening socket: the daemon has its own."""

    acceptor: Acceptor

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections with an `Acceptor`, which respects the limit of open files."""
        await super().startup(sockets=[])
        [listening] = sockets or []
        self.acceptor = Acceptor(listening, self._new_connection, self._make_room, CONNECTIONS)
        self.acceptor.start(self.config.backlog)

    def _new_connection(self) -> asyncio.Protocol:
        assert isinstance(self.config, TlsConfig)
        return TlsHandshake(self.config, self.server_state, self.lifespan.state)

    def _make_room(self) -> bool:
        """Close an idle connection to make room; return False if none is idle."""
        if TlsHandshake.abort_oldest():
            return True
        idle = Connection.idle_longest(Connection.open_among(self.server_state.connections))
        if idle is not None:
            idle.abort()
        return idle is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, without waiting for TLS handshakes."""
        self.acceptor.close()
        TlsHandshake.abort_all()
        await super().shutdown(sockets)


def _uvicorn(app: ASGIApp, drain_s: float) -> TlsConfig:
    # errors only: uvicorn warns of every malformed request, so any client could fill the log
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return TlsConfig(
        app,
        http=TlsHandshake,
        loop="asyncio",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        headers=_HEADERS,
        proxy_headers=False,
        timeout_keep_alive=int(HEAD_S),
        h11_max_incomplete_event_size=_HEAD_BYTES,
        timeout_graceful_shutdown=int(drain_s + _END_S),
        backlog=_BACKLOG,
    )


def _edge_of(config: ServiceConfig) -> "tuple[str | None, DeviceKeys | None]":
    """Return the edge and its keys, for detecting a change."""
    return config.edge, DeviceKeys.load(config.keys) if config.keys is not None else None
