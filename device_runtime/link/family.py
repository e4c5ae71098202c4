"""The links of one device to one edge, whose address may change at any time."""

from __future__ import annotations

import threading
from pathlib import Path

from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.loss import Interrupt, Patience
from pilotfish.wire.address import require_address
from pilotfish.wire.errors import UnsupportedError
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.transport import is_loopback


class Family:
    """The links of devices that share one drafter and one edge. Thread-safe."""

    def __init__(self, edge: str, keys: DeviceKeys | None) -> None:
        self.address = edge, keys
        self._links: set[EdgeLink] = set()
        self._lock = threading.Lock()

    def open(self, patience: Patience, interrupt: Interrupt) -> EdgeLink:
        """Open a link to the present address; later changes reach it too."""
        with self._lock:
            link = EdgeLink(*self.address, patience, interrupt)
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


def load_keys(edge: str, folder: str | Path | None) -> DeviceKeys | None:
    """Read the keys in this folder; beyond loopback they are needed."""
    require_address(edge)
    if folder is None and not is_loopback(edge):
        raise UnsupportedError(
            f"Without keys a device talks to loopback only, not to {edge}; name the folder "
            "with device.key and edge.pub."
        )
    return DeviceKeys.load(Path(folder)) if folder is not None else None
