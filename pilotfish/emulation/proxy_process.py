"""The emulator's process: a `Proxy` with a pipe to the `Emulator` that started it.

`python -m pilotfish.emulation.proxy_process DESCRIPTOR` reads requests from a socket, one JSON
object a line, and answers each with one JSON object. The first request configures the proxy; later
ones change the link or request totals. When the other end closes, the process ends.
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


def _answer(proxy: Proxy, request: dict[str, Any]) -> dict[str, Any]:
    if "set" in request:
        proxy.change(Conditions(**request["set"]))
        return {"since_s": proxy.since_s}
    if "cut" in request:
        proxy.cut(**request["cut"])
    return {"traffic": asdict(proxy.traffic())}


def main(descriptor: int) -> int:
    """Run the proxy until the parent ends; return the exit status."""
    with socket.socket(fileno=descriptor) as connection:
        pipe = ChildPipe(connection)
        first = pipe.receive()
        if first is None:
            return 0
        try:
            proxy = Proxy(first["listen"], first["connect"], Conditions(**first["conditions"]))
        except PilotfishError as error:
            pipe.send_error(error)
            return error.exit_code

        def serve_request() -> None:
            request = pipe.receive()  # never blocks: the parent writes whole lines
            if request is None:
                proxy.stop()
                return
            try:
                pipe.send(_answer(proxy, request))
            except PilotfishError as error:
                pipe.send_error(error)

        proxy.watch(descriptor, serve_request)
        take_precedence()
        gc.freeze()
        pipe.send({"endpoint": proxy.endpoint, "since_s": proxy.since_s})
        proxy.run()
        proxy.close()
        return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
