"""The emulator's process: a `Proxy`, tied to the `Emulator` that started it.

`python -m pilotfish.wire.emulation.tied DESCRIPTOR` reads requests from a socket, one JSON object a
line, and answers each with one. The first configures the proxy; later ones change the link or ask
for totals. When the other end closes, the process ends.
"""

import gc
import json
import socket
import sys
from dataclasses import asdict
from typing import Any

from pilotfish.wire.emulation.emulator import Conditions
from pilotfish.wire.emulation.proxy import Proxy, take_precedence
from pilotfish.wire.errors import PilotfishError


class _Tie:
    """The child's end of the socket pair."""

    def __init__(self, tie: socket.socket) -> None:
        self._tie = tie
        self._unread = b""

    def question(self) -> dict[str, Any] | None:
        """Read the next request; None when the parent is gone."""
        while b"\n" not in self._unread:
            part = self._tie.recv(65536)
            if not part:
                return None
            self._unread += part
        line, self._unread = self._unread.split(b"\n", 1)
        asked: dict[str, Any] = json.loads(line)
        return asked

    def tell(self, answer: dict[str, Any]) -> None:
        """Answer a request."""
        self._tie.sendall(json.dumps(answer).encode() + b"\n")


def _refusal(error: PilotfishError) -> dict[str, Any]:
    return {"code": error.code, "message": str(error)}


def _answer(proxy: Proxy, asked: dict[str, Any]) -> dict[str, Any]:
    if "set" in asked:
        try:
            proxy.change(Conditions(**asked["set"]))
        except PilotfishError as error:
            return _refusal(error)
        return {"since_s": proxy.since_s}
    if "cut" in asked:
        proxy.cut(**asked["cut"])
    return {"traffic": asdict(proxy.traffic())}


def main(descriptor: int) -> int:
    """Run the proxy until the parent is gone; returns the exit code."""
    with socket.socket(fileno=descriptor) as connection:
        tie = _Tie(connection)
        first = tie.question()
        if first is None:
            return 0
        try:
            proxy = Proxy(first["listen"], first["connect"], Conditions(**first["conditions"]))
        except PilotfishError as error:
            tie.tell(_refusal(error))
            return error.exit_code

        def converse() -> None:
            asked = tie.question()  # the parent writes whole lines, one at a time
            if asked is None:
                proxy.stop()
            else:
                tie.tell(_answer(proxy, asked))

        proxy.watch(descriptor, converse)
        take_precedence()
        gc.freeze()
        tie.tell({"endpoint": proxy.endpoint, "since_s": proxy.since_s})
        proxy.run()
        proxy.close()
        return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
