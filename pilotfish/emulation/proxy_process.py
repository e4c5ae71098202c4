"""The emulator's process: a `Proxy`, tied to the `Emulator` that started it.

`python -m pilotfish.emulation.proxy_process DESCRIPTOR` reads requests from a socket, one JSON object a
line, and answers each with one. The first configures the proxy; later ones change the link or ask
for totals. When the other end closes, the process ends.
"""

import gc
import socket
import sys
from dataclasses import asdict
from typing import Any

from pilotfish.base.child import ChildPipe
from pilotfish.base.errors import PilotfishError
from pilotfish.emulation.emulator import Conditions
from pilotfish.emulation.proxy import Proxy, take_precedence


def _answer(proxy: Proxy, asked: dict[str, Any]) -> dict[str, Any]:
    if "set" in asked:
        proxy.change(Conditions(**asked["set"]))
        return {"since_s": proxy.since_s}
    if "cut" in asked:
        proxy.cut(**asked["cut"])
    return {"traffic": asdict(proxy.traffic())}


def main(descriptor: int) -> int:
    """Run the proxy until the parent is gone; returns the exit code."""
    with socket.socket(fileno=descriptor) as connection:
        tie = ChildPipe(connection)
        first = tie.receive()
        if first is None:
            return 0
        try:
            proxy = Proxy(first["listen"], first["connect"], Conditions(**first["conditions"]))
        except PilotfishError as error:
            tie.send_error(error)
            return error.exit_code

        def converse() -> None:
            asked = tie.receive()  # the parent writes whole lines, one at a time
            if asked is None:
                proxy.stop()
                return
            try:
                tie.send(_answer(proxy, asked))
            except PilotfishError as error:
                tie.send_error(error)

        proxy.watch(descriptor, converse)
        take_precedence()
        gc.freeze()
        tie.send({"endpoint": proxy.endpoint, "since_s": proxy.since_s})
        proxy.run()
        proxy.close()
        return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
