"""Serve a program's metrics to Prometheus, over a small HTTP server.

In:  the metric families of the program, an edge or a watch. Out: these and the metrics of the
     process in Prometheus's text format, generated for each request in a thread of the HTTP server.
     The ``Host`` of a request must be this machine (`is_own_host`), so that a foreign page in a
     browser cannot read the metrics.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pilotfish.base.errors import ListenError, UnsupportedError
from pilotfish.base.extras import install_command
from pilotfish.base.settings import setting
from pilotfish.edge_runtime.exposition import Application, Exposition
from pilotfish.wire.transport import is_own_host

if TYPE_CHECKING:
    from prometheus_client import Metric

MetricsAddress: TypeAlias = Annotated[
    tuple[str, int],
    setting(
        "serve metrics for Prometheus at this address; without HOST: on loopback (default: no "
        "metrics)",
        form="host:port",
        metavar="HOST:PORT",
    ),
]
MetricsHosts: TypeAlias = Annotated[
    tuple[str, ...],
    setting(
        "answer requests for metrics that name this host, in addition to requests by IP address "
        "or for localhost; may be repeated",
        flag="metrics_host",
        metavar="NAME",
        repeat=True,
    ),
]


class MetricsServer:
    """Metrics server on (host, port) until it is closed; with port 0 the system chooses a port.

    hosts: further names of this machine that requests may use. address: the address with the real
    port. Until `serve` is called, answers have only the metrics of the process. Raises
    `UnsupportedError` without the Prometheus library, `ListenError` if the address cannot be used.
    """

    def __init__(self, host: str, port: int, hosts: Sequence[str] = ()) -> None:
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
        except ImportError:
            raise UnsupportedError(
                f"--metrics needs the extra `serve`: {install_command('serve')}."
            ) from None
        registry = CollectorRegistry()
        self._families: Callable[[], Iterable[Metric]] = tuple
        registry.register(self)
        ProcessCollector(registry=registry)
        try:
            application = _for_own_hosts(make_wsgi_app(registry), (host, *hosts))
            self._server = Exposition(application, host, port)
        except (OSError, OverflowError) as error:
            raise ListenError(f"Metrics cannot be served on {host}:{port}: {error}.") from error
        self.address = f"{host}:{self._server.port}"

    def serve(self, families: Callable[[], Iterable["Metric"]]) -> None:
        """Serve these metric families from now on. families: called for each request."""
        self._families = families

    def describe(self) -> list["Metric"]:
        """Return no metric names, so that the registration does not have to collect metrics."""
        return []

    def collect(self) -> Iterable["Metric"]:
        """Return all metric families with their present values."""
        return self._families()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()


def _for_own_hosts(answered: Application, hosts: Sequence[str]) -> Application:
    """Wrap an application: it answers requests for this machine; others are refused.

    hosts: further names of this machine.
    """
    names = frozenset(host.lower() for host in hosts)

    def application(environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        host = environment.get("HTTP_HOST", "")
        if is_own_host(host, names):
            return answered(environment, start)
        start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        message = (
            f"{host[:100]!r} is not a known name of this machine: use its IP address, or allow "
            "the name by --metrics-host"
        )
        return [f"{message}.\n".encode()]

    return application
