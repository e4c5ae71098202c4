"""Messages that wait to be read: neither end dies of them, whatever their sender does meanwhile.

libzmq 4.3.5 ends the process by an assertion when a heartbeat is due on a connection of which it
has stopped reading, since its receive queue was full.
"""

import subprocess
import sys

import pytest

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
receive = lambda: receiver.take(0.0)
while not receiver.connected:
    receiver.take(0.01)
receiver.send(Ping(nonce=1))
name = sender.recv_multipart()[0]
def send():
    sender.send_multipart([name, b"unread"])
""",
}
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
    program = _PROGRAM.format(end=_ENDS[end], then=_SENDERS[then], messages=MESSAGES)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    # with its connection a device loses what it has not read, and asks for it again
    assert int(done.stdout) == MESSAGES or (end, then) == ("device", "hangs up")
