"""The links of one device to one edge; the edge's address may change at any time."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from pathlib import Path

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.link.connectivity import REFUSALS, Connectivity, LinkStatus
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.retry import FAIL, CancelToken, RetryPolicy
from pilotfish.wire.address import require_address
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.transport import is_loopback

LINK_LOG = "pilotfish.device.link"
_log = logging.getLogger(LINK_LOG)

_RANK = {state: at for at, state in enumerate(Connectivity)}


class LinkGroup:
    """The links of devices that share one drafter and one edge. Thread-safe.

    Logs each change of state once, even if several links notice it.
    """

    def __init__(self, edge: str, keys: DeviceKeys | None) -> None:
        self.address = edge, keys
        self._links: set[EdgeLink] = set()
        self._lock = threading.Lock()
        self._log_lock = threading.Lock()  # held to read and log the state, in order
        self._logged = Connectivity.CONNECTING
        self._away_s = time.monotonic()

    def open(self, patience: RetryPolicy, interrupt: CancelToken) -> EdgeLink:
        """Open a link to the present address; later redirects also apply to this link."""
        with self._lock:
            link = EdgeLink(*self.address, patience, interrupt)
            link.changed = partial(self._log_change, patience)
            self._links.add(link)
            return link

    def remove(self, link: EdgeLink) -> None:
        """Forget a closed link."""
        with self._lock:
            self._links.discard(link)

    def redirect(self, edge: str, folder: str | Path | None) -> None:
        """Point all links at another address; folder None: keep the keys."""
        with self._lock:
            address = edge, load_keys(edge, folder) if folder is not None else self.address[1]
            if address[1] is None:
                load_keys(edge, None)
            if address == self.address:
                return
            for link in self._links:
                link.redirect(*address)
            self.address = address

    def reconnect(self) -> None:
        """Replace the connections of all links by new ones: the path to the edge has changed."""
        with self._lock:
            for link in self._links:
                link.redirect(*self.address)

    def retry(self) -> None:
        """Reconnect all unconnected links now: keys may have changed."""
        with self._lock:
            for link in self._links:
                link.retry()

    @property
    def status(self) -> LinkStatus | None:
        """The best state among the links, in words; None without links."""
        with self._lock:
            links = [*self._links]
        states = (link.status for link in links)
        return min(states, key=lambda status: _RANK[status.state], default=None)

    def _log_change(self, patience: RetryPolicy) -> None:
        """Log the state if it has changed: a loss as a warning, its end as information."""
        with self._log_lock:
            status, before = self.status, self._logged
            if status is None or status.state in (before, Connectivity.CONNECTING):
                return
            first = before is Connectivity.CONNECTING
            if (
                first
                and status.state is not Connectivity.CONNECTED
                and not patience.starts_without_edge
            ):
                return  # the device cannot start, and raises an error with the same text
            self._logged = status.state
            if status.state is not Connectivity.CONNECTED:
                if before is Connectivity.CONNECTED:
                    self._away_s = time.monotonic()
                then = patience.consequence(refused=status.state in REFUSALS)
                _log.warning("%s: %s %s", status.state.value, status, then)
                return
            away_s = time.monotonic() - self._away_s
            after = "" if first else f", {away_s:.1f} s after {before.value}"
            _log.info("%s%s: %s", status.state.value, after, status)
        self.retry()  # all links: the cause of the loss may be over


def load_keys(edge: str, folder: str | Path | None) -> DeviceKeys | None:
    """Read the keys in this folder; beyond loopback, keys are required."""
    require_address(edge)
    if folder is None and not is_loopback(edge):
        raise UnsupportedError(
            f"Without keys a device connects to loopback only, not to {edge}: name the folder "
            "with device.key and edge.pub (--keys DIR). `pilotfish keys new device` creates "
            "device.key; copy edge.pub from the edge."
        )
    return DeviceKeys.load(Path(folder)) if folder is not None else None


def connect(edge: str, keys: str | Path | None, patience_s: float | None = None) -> EdgeLink:
    """Connect to an edge with the keys in this folder; beyond loopback, keys are required.

    patience_s: seconds to wait for an absent edge or a late reply; None: as under policy "fail".
    """
    patience = FAIL if patience_s is None else RetryPolicy.from_policy("wait", patience_s)
    link = EdgeLink(edge, load_keys(edge, keys), patience)
    try:
        link.connect()
    except BaseException:
        link.close()
        raise
    return link
