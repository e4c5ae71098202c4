"""Hostile grammars, and a device that sends them to an edge; for `constraints.py` only.

    python _constraints_attacks.py ENDPOINT TOLD

A process of its own that speaks the bare wire, so that nothing is refused before the edge sees it.
TOLD is a JSON object: the ids of a prompt, the size of the vocabulary, its end tokens, and the
tokens to draft in trees. Lines on stdin name an attack and a folder of keys; each is answered by a
line of JSON.
"""

import json
import secrets
import string
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from pilotfish.speculation.logits_options import Grammar
from pilotfish.speculation.tree import Tree
from pilotfish.speculation.truncation import SparseRows
from pilotfish.wire import messages as m
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.codecs.ids import decode_ids, encode_ids
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.protocols.tree import TokenTree, TreeDraft

TOKENS = 24  # of an answer under a hostile grammar
SECONDS = 3.0  # of an attack that goes on
SESSIONS = 8
_PATIENCE_S = 20.0
LETTERS = string.ascii_letters


class Attack(NamedTuple):
    """A grammar, and how it is sent.

    once: and an answer asked for. again: as often as the edge takes it. fresh: so, and no two of
    them alike. held: by so many sessions as a key may have. tree: with trees of drafts, each of
    which leads into a dead end.
    """

    grammar: Grammar
    mode: str = "once"


def _json(schema: Any) -> Grammar:
    return Grammar.from_schema(schema)


def _many(count: int) -> Any:
    """An array of so many bounded numbers."""
    return {"type": "array", "prefixItems": [
        {"type": "integer", "minimum": i, "maximum": 10**9 + 7 * i} for i in range(count)
    ]}  # fmt: skip


def _dead(count: int) -> Grammar:
    """A letter that nothing may follow, beside so many alternatives.

    This vocabulary lacks the byte 4; where another has it, this is no dead end.
    """
    rest = " | ".join(f'"{i}" /[a-z]{{{i % 40 + 1},}}/' for i in range(count))
    return Grammar("lark", f"start: A | r\nA: /[a-zA-Z]\\x04/\nr: {rest}")


_PROPERTIES = _json(
    {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(900)}}
)
_PATTERNS = {"type": "string", "allOf": [{"pattern": f"a.{{{5 + i}}}b"} for i in range(25)]}
_RULES = Grammar(
    "lark", "start: r0\n" + "".join(f'r{i}: r{i + 1} | "b"\n' for i in range(2000)) + 'r2000: "a"'
)
_NONE = Grammar("", "")
ATTACKS = {
    "(no grammar)": Attack(_NONE),
    "(no grammar, again)": Attack(_NONE, "again"),
    "(no grammar, trees)": Attack(_NONE, "tree"),
    "nested alternation": Attack(Grammar("regex", "(((a|b|c|d|e){1,40}){1,40}){1,40}x")),
    "nested repetition": Attack(Grammar("regex", "(([a-z]{1,100}){1,100}){1,100}x")),
    "powers": Attack(Grammar("regex", "(a|b)*a(a|b){2000}")),
    "unicode": Attack(Grammar("regex", r"(\p{L}{1,500}\p{N}){1,500}")),
    "counted pattern": Attack(_json({"type": "string", "pattern": "^([a-z0-9]{1,5000}-){1,900}$"})),
    "60 KiB enum": Attack(_json({"enum": [f"{i:x}" * 3 for i in range(3900)]})),
    "60 KiB properties": Attack(
        _json({"type": "object", "properties": {f"property {i}": {} for i in range(2900)}})
    ),
    "900 properties": Attack(_PROPERTIES),
    "deep $ref": Attack(
        _json({"$ref": "#/$defs/d0", "$defs": {"d1200": {}} | {
            f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1200)
        }})
    ),
    "recursive $ref": Attack(
        _json({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
            f"c{i}": {"$ref": "#/$defs/n"} for i in range(500)
        }}}})
    ),
    "multipleOf product": Attack(
        _json({"anyOf": [{"type": "integer", "multipleOf": n} for n in range(900, 1000)]})
    ),
    "multipleOf 9973": Attack(_json({"type": "integer", "multipleOf": 9973})),
    "allOf patterns": Attack(_json(_PATTERNS)),
    "anyOf in allOf": Attack(
        _json({"allOf": [
            {"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(2)]}
            for i in range(9)
        ]})
    ),
    "oneOf in oneOf": Attack(
        _json({"oneOf": [{"oneOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(20)]}
                         for i in range(30)]})
    ),
    "nested arrays": Attack(
        Grammar("json", '{"type":"array","minItems":3,"items":' * 100 + "{}" + "}" * 100)
    ),
    "900 bounds": Attack(_json(_many(900))),
    "ambiguous": Attack(Grammar("lark", 'start: s\ns: s s | "a" | s s s |')),
    "all terminals": Attack(
        Grammar("lark", "start: A\nA: " + " & ".join(f"/(.*a.{{{5 + i}}})*/" for i in range(20)))
    ),
    "stars": Attack(
        Grammar("lark", "start: X0\n" + "".join(f"X{i}: X{i + 1}*\n" for i in range(3000))
                + 'X3000: "a"')
    ),
    "forced later": Attack(Grammar("regex", "[bc]a{60000}")),
    "forced": Attack(_json({"const": "ab" * 30000})),
    "900 properties, again": Attack(_PROPERTIES, "again"),
    "900 bounds, fresh": Attack(_json(_many(900)), "fresh"),
    "allOf patterns, fresh": Attack(_json(_PATTERNS), "fresh"),
    "2000 rules, held": Attack(_RULES, "held"),
    "unicode, held": Attack(Grammar("regex", r"(\p{L}{1,500}\p{N}){1,500}"), "held"),
    "200 and dead ends, trees": Attack(_dead(200), "tree"),
    "1500 and dead ends, trees": Attack(_dead(1500), "tree"),
}  # fmt: skip


class Hostile:
    """One connection."""

    def __init__(self, endpoint: str, folder: Path, settings: dict[str, Any]) -> None:
        self._channel = EdgeChannel(endpoint, DeviceKeys.load(folder), 1 << 20)
        self._prompt = np.array(settings["prompt"], np.uint32)
        self._vocab, self._drafts = settings["vocab"], sorted(settings["drafts"])
        self._ends = settings["ends"]
        self._generation = 0
        self._session = b""
        self._sessions: list[bytes] = []
        while not self._channel.connected:
            self._channel.receive(0.1)

    def close(self) -> None:
        """End the sessions, which would keep others from theirs, and the connection."""
        for session in self._sessions:
            self._send(m.Close(session=session))
        self._channel.close()

    def _begin(
        self, grammar: Grammar, protocol: str = "stream", *, anew: bool = True
    ) -> CommittedTokens:
        """Begin a generation, in a session of its own if ``anew``; returns its text."""
        if anew or not self._session:
            self._session = secrets.token_bytes(16)
            self._sessions.append(self._session)
        self._generation += 1
        text = CommittedTokens()
        begin = m.Begin(
            session=self._session, generation=self._generation, keep=0, hash=text.hash,
            protocol=protocol, seed=0, temperature=1.0, top_k=0, top_p=1.0,
            shape=m.LogitsOptionsMsg(since=len(self._prompt), grammar=grammar.kind),
        )  # fmt: skip
        text.extend(self._prompt)
        frames = [grammar.text.encode()] if grammar.kind else []
        self._send(begin, encode_ids(self._prompt, self._vocab), *frames)
        return text

    def _send(self, message: Any, *frames: Any) -> None:
        with suppress(zmq.Again):
            self._channel.send(message, frames)

    def _pull(self, text: CommittedTokens, count: int) -> None:
        self._send(
            m.Pull(
                session=self._session, generation=self._generation, start=len(text),
                hash=text.hash, count=count,
            )
        )  # fmt: skip

    def _reply(self) -> tuple[str, list[int]]:
        """What came of the last request: "tokens", and which; an error's code; or "silence"."""
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            arrived = self._channel.receive(0.1)
            if arrived is None:
                continue
            reply, frames = arrived[:2]
            if getattr(reply, "generation", None) not in (None, self._generation):
                continue  # of an earlier one
            if isinstance(reply, m.Failure):
                return reply.code, []
            if isinstance(reply, m.Verdict):
                return "tokens", []
            if isinstance(reply, m.Tokens):
                return "tokens", decode_ids(frames[0], self._vocab).tolist()
        return "silence", []

    def run(self, attack: Attack) -> dict[str, Any]:
        """Do it; returns what came of it, in seconds from the beginning."""
        if attack.mode == "once":
            return self._once(attack.grammar)
        if attack.mode == "held":
            result = [self._once(attack.grammar) for _ in range(SESSIONS)]
            return {**result[0], "times": dict(Counter(each["outcome"] for each in result))}
        return self._often(attack)

    def _once(self, grammar: Grammar) -> dict[str, Any]:
        begun_s = time.monotonic()
        self._pull(self._begin(grammar), TOKENS)
        outcome, ids = self._reply()
        first_s, reply = time.monotonic() - begun_s, ids
        while outcome == "tokens" and len(reply) < TOKENS and reply[-1] not in self._ends:
            outcome, ids = self._reply()
            reply = reply + ids
        return {"outcome": outcome, "settled_s": first_s, "said": len(reply)}

    def _often(self, attack: Attack) -> dict[str, Any]:
        times: Counter[str] = Counter()
        slowest_s, begun_s, first = 0.0, time.monotonic(), ""
        while time.monotonic() - begun_s < SECONDS:
            kind, words = attack.grammar
            fresh = " " * sum(times.values()) if attack.mode == "fresh" else ""
            asked_s = time.monotonic()
            if attack.mode == "tree":
                self._window(self._begin(Grammar(kind, words), "tree", anew=False))
            else:
                self._pull(self._begin(Grammar(kind, words + fresh), anew=False), 1)
            outcome, _ = self._reply()
            first = first or outcome
            slowest_s = max(slowest_s, time.monotonic() - asked_s)
            times[outcome] += 1
            if outcome == "rate-limited":
                time.sleep(0.02)
        return {"outcome": first, "settled_s": slowest_s, "said": 0, "times": dict(times)}

    def _window(self, text: CommittedTokens) -> None:
        """A tree of one level: all of the drafts."""
        tree, ids = Tree(), np.array(self._drafts, np.uint32)
        tree.grow([self._drafts])
        q = SparseRows(ids, np.zeros(len(ids), np.uint8), np.array([len(ids)]))
        draft = TreeDraft(tree.ids, tree, q)
        window = m.Window(
            session=self._session, generation=self._generation, start=len(text), hash=text.hash
        )
        self._send(window, *TokenTree().encode_draft(draft, ids[:0], self._vocab))


def main() -> int:
    endpoint, info = sys.argv[1:]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        name, folder = json.loads(line)
        hostile = Hostile(endpoint, Path(folder), json.loads(info))
        attack = ATTACKS.get(name) or Attack(Grammar("regex", "[0-9]{3}"))
        print(json.dumps(hostile.run(attack)), flush=True)
        if name in ATTACKS:
            sys.stdin.readline()  # until its memory has been read
        hostile.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
