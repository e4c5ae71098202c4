"""The serving loop's side of the service: signals, reloads, the watchdog, and its end.

SIGTERM and SIGINT drain: nothing new is taken, what runs may end, within limits. SIGHUP reads keys
and configuration again while answers run; what is broken then leaves everything as it was. The
watchdog is fed by this loop, and only while every lane that works shows signs of life.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import uvicorn
from starlette.types import ASGIApp

from device_runtime.device import Device
from device_runtime.record import Generation
from device_runtime.service.access import Access, ApiKeys, api_keys
from device_runtime.service.app import Service, application
from device_runtime.service.config import ServiceConfig
from device_runtime.service.connection import HEAD_S, Connection
from device_runtime.service.lanes import Lanes
from device_runtime.service.metrics import Metrics
from device_runtime.service.status import Status
from engines.artifact import Manifest
from engines.errors import EngineError
from wire.errors import PilotfishError
from wire.keys import DeviceKeys
from wire.supervisor import Supervisor

_log = logging.getLogger("pilotfish.service")

_TICK_S = 1.0
_HEAD_BYTES = 32 * 1024
_BACKLOG = 128
_SOFTWARE = 70  # sysexits.h
_END_S = 10.0  # for what was interrupted to end
# What a reload can change; all else needs a restart.
_LIVE = {"edge", "keys", "api_keys", "options", "drain_s", "model"}

Reread = Callable[[], ServiceConfig]


class Daemon:
    """The serving loop's side of it all."""

    def __init__(
        self,
        config: ServiceConfig,
        manifest: Manifest,
        devices: list[Device],
        access: Access,
        supervisor: Supervisor,
        reread: Reread | None,
    ) -> None:
        self._config = config
        self._devices = devices
        self._access = access
        self.metrics = Metrics()
        self.status = Status(drafter=manifest.model, lanes=len(devices), energy=self.metrics.energy)
        self._supervisor = supervisor
        self._reread = reread
        self._edge = _edge_of(config)
        self._protocol = "none yet"
        self._code = 0
        self._stopping = False

    async def run(self, listener: socket.socket, announce: Callable[[str], None]) -> int:
        """Serve on this socket until a signal says otherwise; returns the exit code."""
        self._lanes = Lanes(
            self._devices, places=self._config.queue, told=self._told, counted=self._counted
        )
        self._service = Service(self._config, self._lanes, self._access, self.metrics, self.status)
        self._server = _Server(_uvicorn(application(self._service), self._config.drain_s))
        serving = asyncio.ensure_future(self._server.serve([listener]))
        ticking = asyncio.ensure_future(self._tick())
        ticking.add_done_callback(self._fell_over)
        try:
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.005)
            self._obey_signals()
            host, port = listener.getsockname()[:2]
            self._supervisor.ready(self._line())
            announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            await serving
        finally:
            ticking.cancel()
            self._service.close()
            self._lanes.interrupt()
            ended = await asyncio.to_thread(self._lanes.close, _END_S)
            if not ended:
                _log.error("a lane hangs and is left behind")
            self.metrics.close()
        return self._code

    # Signals

    def _obey_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _stop(self, number: signal.Signals) -> None:
        """The first time, drain; the second time, be quick about it."""
        if self._stopping:
            self._lanes.interrupt()
            return
        self._stopping = True
        self._code = 0 if number == signal.SIGTERM else 128 + number
        drain_s = self._config.drain_s
        self._supervisor.stopping(f"Draining: {self._lanes.running} answers may end")
        self._supervisor.extend(drain_s + 2 * _END_S)
        self._lanes.refuse_waiting()
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(drain_s, self._lanes.interrupt)

    def _reload(self) -> None:
        """Read keys and configuration again; what is broken leaves everything as it was."""
        self._supervisor.reloading()
        try:
            config = self._reread() if self._reread is not None else self._config
            keys = api_keys(config.api_keys, self._config.listen)  # it listens where it did
            edge = _edge_of(config)
            if edge != self._edge and config.edge is not None:
                self._devices[0].redirect(config.edge, config.keys)  # and all beside it
            self._adopt(config, keys, edge)
        except (PilotfishError, EngineError, OSError) as error:
            _log.error("nothing was reloaded: %s", error)
        self._supervisor.ready(self._line())

    def _adopt(
        self,
        config: ServiceConfig,
        keys: ApiKeys | None,
        edge: "tuple[str | None, DeviceKeys | None]",
    ) -> None:
        before = self._config
        changed = {
            one.name
            for one in fields(config)
            if getattr(config, one.name) != getattr(before, one.name)
        }
        if fixed := sorted(changed - _LIVE):
            _log.warning("needs a restart to change: %s", ", ".join(fixed))
        self._config = replace(before, **{name: getattr(config, name) for name in _LIVE})
        self._service.config = self._config
        self._access.keys, self._edge = keys, edge
        _log.info("reloaded")

    # What is told

    async def _tick(self) -> None:
        feed_s = self._supervisor.feed_s
        pause_s = _TICK_S if feed_s is None else min(_TICK_S, feed_s / 2)
        while True:
            self._lanes.tend()
            up, state = self._service.link_up, self._service.link_state
            self.metrics.link(up, state)
            self.status.link(up, state)
            stuck = self._service.stuck()
            if stuck:
                _log.error("lanes without a sign of life: %s", stuck)
            else:
                self._supervisor.feed()
            if not self._stopping:
                self._supervisor.status(self._line())
            await asyncio.sleep(pause_s)

    def _fell_over(self, ticking: "asyncio.Future[None]") -> None:
        """Nobody looks after the service any more: better to start again, and to say why."""
        if not ticking.cancelled() and (error := ticking.exception()) is not None:
            _log.error("the service cannot look after itself", exc_info=error)
            self._code = _SOFTWARE
            self._server.should_exit = True

    def _line(self) -> str:
        lanes = self._lanes
        where = "no edge"
        if self._config.edge is not None:
            where = f"edge {'up' if self._service.link_up else 'down'} at {self._config.edge}"
        return (
            f"{lanes.running} of {len(lanes.lanes)} lanes busy, {max(0, lanes.waiting)} waiting; "
            f"{where}; last protocol: {self._protocol}"
        )

    def _told(self, generation: Generation) -> None:
        self._protocol = generation.protocol
        self.metrics.generation(generation)
        self.status.generation(generation)

    def _counted(self, waiting: int, running: int) -> None:
        self.metrics.queue(waiting, running)
        self.status.queue(waiting, running)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn(app: ASGIApp, drain_s: float) -> uvicorn.Config:
    # it warns of each thing that is no request, so that a stranger could fill the log
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return uvicorn.Config(
        app,
        http=Connection,
        loop="asyncio",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(HEAD_S),
        h11_max_incomplete_event_size=_HEAD_BYTES,
        timeout_graceful_shutdown=int(drain_s + _END_S),
        backlog=_BACKLOG,
    )


def _edge_of(config: ServiceConfig) -> "tuple[str | None, DeviceKeys | None]":
    """The edge and the keys to it, as far as a change of them shows."""
    return config.edge, DeviceKeys.load(config.keys) if config.keys is not None else None
