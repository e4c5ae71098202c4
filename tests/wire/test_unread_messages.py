"""Messages that wait to be read: neither end dies of them, whatever their sender does meanwhile.

libzmq 4.3.5 ends the process by an assertion when a heartbeat is due on a connection of which it
has stopped reading, since its receive queue was full.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import zmq

from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.link.tcp import next_event
from tests.support.daemons import free_port

MESSAGES = 100
_ENDS = {
    "edge": """
receiver = Listener(zmq.Context(), "tcp://127.0.0.1:0", None, Bounds(8, 8, 1 << 20))
receive = receiver.receive
sender = zmq.Context().socket(zmq.DEALER)
sender.linger = 0
sender.connect(receiver.endpoint)
def send():
    sender.send(b"unread")
""",
    "device": """
sender = zmq.Context().socket(zmq.ROUTER)
sender.linger = 0
port = sender.bind_to_random_port("tcp://127.0.0.1")
receiver = EdgeChannel(f"tcp://127.0.0.1:{port}", None, 1 << 20)
receive = lambda: receiver.receive_raw(0.0)
while not receiver.connected:
    receiver.receive_raw(0.01)
receiver.send(Ping(nonce=1))
name = sender.recv_multipart()[0]
def send():
    sender.send_multipart([name, b"unread"])
""",
}
_ENDS["local edge"] = _ENDS["edge"].replace("tcp://127.0.0.1:0", "ipc://@pilotfish-unread-PID")
_SENDERS = {
    "hangs up": "sender.close()",
    "stays": "",
}
_PROGRAM = """
import time, zmq
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.connections import Bounds
from pilotfish.wire.messages import Ping
from pilotfish.wire.transport import Listener
{end}
for _ in range({messages}):
    send()
time.sleep(0.3)
{then}
time.sleep(1.7)  # heartbeats are due, and overdue
count = 0
while receive() is not None:
    count += 1
time.sleep(0.5)
print(count, flush=True)
"""


@pytest.mark.parametrize("then", _SENDERS)
@pytest.mark.parametrize("end", _ENDS)
def test_messages_that_wait_end_no_process(end: str, then: str) -> None:
    program = _PROGRAM.format(
        end=_ENDS[end].replace("PID", str(os.getpid())), then=_SENDERS[then], messages=MESSAGES
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    # with its connection a device loses what it has not read, and asks for it again; a local edge's
    # queue is short
    assert int(done.stdout) == MESSAGES or (end, then) == ("device", "hangs up") or "local" in end


def test_a_channel_of_which_nothing_is_read_is_watched() -> None:
    """Its edge comes while its owner sleeps, and sends more than may wait, at no great speed."""
    port = free_port()
    channel = EdgeChannel(f"tcp://127.0.0.1:{port}", None, 1 << 20)
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as edge:
            edge.linger, edge.sndhwm = 0, 1
            monitor = edge.get_monitor_socket(int(zmq.Event.DISCONNECTED))
            edge.bind(f"tcp://127.0.0.1:{port}")
            end_s = time.monotonic() + 20.0
            while next_event(monitor) is None:  # it hangs up on the edge
                assert time.monotonic() < end_s
                with suppress(zmq.Again):
                    edge.send(bytes(50_000), zmq.NOBLOCK)
                time.sleep(0.02)
            monitor.close(0)
    finally:
        channel.close()


def test_a_channel_without_an_edge_is_closed_at_once() -> None:
    """However many attempts to connect nothing has read of."""
    program = """
import time, zmq
from pilotfish.wire.channel import EdgeChannel
set_option = zmq.Socket.__setattr__
def soon(socket, name, value):  # eight minutes of attempts in some seconds
    set_option(socket, name, {"reconnect_ivl": 1, "reconnect_ivl_max": 0}.get(name, value))
zmq.Socket.__setattr__ = soon
channel = EdgeChannel("tcp://127.0.0.1:%d", None, 1 << 20)
channel._looked_s = float("inf")  # an owner that is taken for awake
time.sleep(3.0)
channel.close(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program % free_port()],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
