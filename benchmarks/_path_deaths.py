"""Cases of `paths`: edges and paths that die, and what it takes to go on."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

from _path_cases import Row
from _path_lab import Answer, Lab, Service, letters

_NOTICED_S = 1.2  # a path that is gone shows, on a LAN
_PROMISED_S = 2.2  # then `fail` ends an answer
_SLACK_S = 0.1  # seconds that a busy machine and the polling interval may add
_PROMPTS = ("hi", "sky", "why is it so", "three names", "a list", "tell me")


def chat(lab: Lab, quick: bool) -> Iterator[Row]:
    """The edge dies in a long conversation, comes back, and hears all of it over a slow link."""
    for rate_bps in (256e3,) if quick else (256e3, 64e3):
        lab.path.set(up_bps=None, down_bps=None, rtt_s=0.05)
        with lab.service("wait", "--patience", 120, "--max-tokens", 8000) as service:
            service.answer(letters(30_000), 8)
            seen, thread = service.begin(letters(30_000), 2000)
            while not seen.pieces_s:
                time.sleep(0.05)
            before = lab.path.up().sent_bytes
            lab.path.set(up_bps=rate_bps, down_bps=1e6)
            lab.signal_edge(signal.SIGKILL)
            lab.stop_edge()
            lab.start_edge()
            back_s, count = time.monotonic(), len(seen.pieces_s)
            while thread.is_alive() and len(seen.pieces_s) <= count + 1:
                if time.monotonic() - back_s > 200:
                    break
                time.sleep(0.05)
            yield {
                "what": f"40 kB again, {rate_bps / 1e3:g} kbit/s",
                "policy": "wait",
                "seconds": time.monotonic() - back_s,
                "up sent": lab.path.up().sent_bytes - before,
                "said": seen.error or ("went on" if len(seen.pieces_s) > count + 1 else "did not"),
            }
            lab.path.set(up_bps=None, down_bps=None)
        thread.join(30)
    lab.idealise()


def death(lab: Lab, quick: bool) -> Iterator[Row]:
    """Until a dead edge shows on a LAN, and until `fail` ends an answer."""
    lab.path.set(rtt_s=0.02)  # so that an answer lasts

    def frozen() -> None:
        lab.signal_edge(signal.SIGSTOP)

    def thawed() -> None:
        lab.signal_edge(signal.SIGCONT)

    def killed() -> None:
        lab.signal_edge(signal.SIGKILL)

    def restarted() -> None:
        lab.stop_edge()
        lab.start_edge()

    ways: list[tuple[str, Callable[[], None], Callable[[], None]]] = [
        ("path cut", lab.path.cut, lab.path.restore),
        ("edge frozen", frozen, thawed),
        ("edge killed", killed, restarted),
    ]
    for what, kill, undo in ways:
        for _ in range(1 if quick else 3):
            with lab.service("fail") as service:
                service.await_edge(True)
                time.sleep(1.0)
                kill()
                noticed = service.await_edge(False)
            undo()
            yield _noticed(f"{what}: idle", noticed)
            # anew: a connection that has come back after a pause is given as long a one again
            with lab.service("fail") as service:
                service.await_edge(True)
                seen, thread = _answering(service)
                kill()
                at_s = time.monotonic()
                noticed = service.await_edge(False)
                thread.join(60)
                undo()
                yield _noticed(f"{what}: answering", noticed)
                yield {
                    "what": f"{what}: ended",
                    "policy": "fail",
                    "seconds": seen.ended_s - at_s,
                    "limit": _NOTICED_S + _PROMISED_S + _SLACK_S,
                    "said": seen.error[:100],
                }
    lab.idealise()


def roam(lab: Lab, quick: bool) -> Iterator[Row]:
    """The device gets another address, or a NAT forgets it, in an answer: how long that pauses."""
    lab.path.set(rtt_s=0.02)
    ways: list[tuple[str, Callable[[], object]]] = [
        ("another address", lab.path.change_address),
        ("NAT forgets", lab.path.rebind),
    ]
    for what, happen in ways:
        for _ in range(1 if quick else 3):
            with lab.service("fail") as service:
                service.await_edge(True)
                seen, thread = _answering(service)
                happen()
                at_s = time.monotonic()
                thread.join(60)
            later = [at_s, *(each for each in seen.pieces_s if each > at_s)]
            yield {
                "what": f"{what}: pause",
                "policy": "fail",
                "seconds": max((b - a for a, b in pairwise(later)), default=-1.0),
                "limit": _NOTICED_S + _PROMISED_S,
                "said": seen.error[:100],
            }
    lab.idealise()


def _noticed(what: str, seconds: float | None) -> Row:
    return {
        "what": what,
        "seconds": -1.0 if seconds is None else seconds,
        "limit": _NOTICED_S + _SLACK_S,
    }


def _answering(service: Service) -> tuple[Answer, threading.Thread]:
    """Begin an answer that still lasts after a second and a half."""
    for prompt in _PROMPTS:
        seen, thread = service.begin(prompt, 6000)
        time.sleep(1.5)
        if thread.is_alive():
            return seen, thread
    raise RuntimeError("no answer lasts")
