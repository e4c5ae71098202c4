"""`pilotfish chat` with real processes: pipes, a terminal, and an edge that is killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from pathlib import Path

from pilotfish import Device, EdgeServer
from tests.conftest import Pair
from tests.support.commands import children, command
from tests.support.terminal import TerminalProcess

GREEDY = ("--protocol", "greedy", "--max-tokens", 12)


def test_each_line_of_a_pipe_is_a_message_of_one_conversation(
    pair: Pair, edge: EdgeServer, device: Device
) -> None:
    words = command("chat", "--draft", pair.draft, "--edge", edge.endpoint, *GREEDY)
    done = subprocess.run(
        words, input="abc\n\nde\n/new\nde\n", capture_output=True, text=True, check=True
    )
    messages: list[dict[str, str]] = []
    texts = []
    for line in ("abc", "de"):
        messages.append({"role": "user", "content": line})
        answer = device.generate(messages, protocol="greedy", max_tokens=12)
        texts.append(answer.text)
        messages.append({"role": "assistant", "content": answer.turn.content})
    texts.append(device.generate(messages[2:3], protocol="greedy", max_tokens=12).text)
    assert done.stdout == "".join(f"{text}\n" for text in texts)
    assert texts[1] != texts[2]
    assert "\x1b" not in done.stdout + done.stderr


def test_with_both_ends_here_the_drafter_goes_on_alone_when_the_edge_is_killed(pair: Pair) -> None:
    words = command("chat", "--draft", pair.draft, "--target", pair.target, *GREEDY)
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("abc\n")
        process.stdin.flush()
        assert process.stdout.read(1)  # an answer has begun, so the edge serves
        [edge] = children(process.pid)
        os.kill(edge, signal.SIGKILL)
        stdout, stderr = process.communicate("de\n/stats\n", timeout=90)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert stdout.endswith("\n")
    assert "the drafter answers alone" in stderr


def test_ctrl_c_interrupts_the_answer_and_not_the_chat(long_pair: Pair, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    with EdgeServer(long_pair.target, threads=1, context=32768, sessions=2) as edge:
        words = command(
            "chat", "--draft", long_pair.draft, "--edge", edge.endpoint, "--threads", 1,
            "--protocol", "coupled", "--temperature", 1, "--max-tokens", 20000,
        )  # fmt: skip
        terminal = TerminalProcess(words, environment)
        assert "accepted draft" in terminal.until("\n> ")
        terminal.send("abc\n")
        begun = len(terminal.until("\x1b[32m", len(terminal.text)))  # a drafted token is green
        terminal.send("\x03")
        interrupted = len(terminal.until("> ", begun))
        terminal.send("/stats\n")  # the interrupted answer has none
        terminal.until("There is no answer yet", interrupted)
        terminal.send("\x03")
        terminal.until("Ctrl-D ends the chat", interrupted)
        terminal.send("\x1b[A\x1b[A\n")  # the arrow keys bring the message back
        again = len(terminal.until("abc", interrupted))
        terminal.until("\x1b[32m", again)
        terminal.send("\x03")
        terminal.until("> ", again)
        terminal.send("\x04")
        assert terminal.ends() == 0, terminal.text
    history = tmp_path / "pilotfish" / "chat_history"
    assert history.read_text().splitlines() == ["abc", "/stats", "abc"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
