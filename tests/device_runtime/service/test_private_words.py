"""What one API key said is in nothing that another one reads: under no protocol, over no route.

bob and carol ask the same things, bob before alice has said a secret and carol afterwards. Whatever
carol reads must be what bob read.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotfish import EdgeServer
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire.protocols import PROTOCOL_REGISTRY
from tests.conftest import Pair
from tests.support import web
from tests.support.calling import callers
from tests.support.judging import random_head, saved
from tests.support.registered import LOSSLESS, sampling_only
from tests.support.serving import Serving, serving

assert callers  # a fixture

PARROT = {"PILOTFISH_PROTOCOLS": "tests.support.lossy_protocol"}
KEYS = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob", "carol")}
BEGIN = "The password of the vault is"
SECRET = f"{BEGIN} XK-7351-QZ-88 and the meeting is at the old harbour on Friday."
WORDS = r"(?<![.\d])7351|XK|QZ|harbour|Friday|meeting"  # and no figure
ANYTHING = {"tau": 1.0, "lambdas": [1e6, 1.0, 0.0], "window": 8}
CHAINS = [name for name in LOSSLESS if not PROTOCOL_REGISTRY[name].allows_trees]
WISHES: dict[str, dict[str, Any]] = {
    **{
        f"{name}, sampled": {"protocol": name, "temperature": 1}
        for name in [*sampling_only(CHAINS), "stream"]
    },
    "tree": {"protocol": "tree", "temperature": 1, "expansion": [2, 2, 1]},
    "greedy": {"protocol": "greedy", "temperature": 0, "window": 8},
    "greedy, auto": {"protocol": "greedy", "temperature": 0, "window": "auto"},
    "adaptive": {"protocol": "adaptive", "temperature": 1, **ANYTHING},
    "adaptive, auto": {"protocol": "adaptive", "temperature": 1, **ANYTHING, "window": "auto"},
    "adaptive, cool": {"protocol": "adaptive", "temperature": 0.3, **ANYTHING},
    "parrot": {"protocol": "parrot", "temperature": 0, "window": 8},
}
OF_A_MODEL: dict[str, dict[str, Any]] = {
    "wisv-full": {"protocol": "wisv-full", "temperature": 0, "threshold": 1.0, "window": 8},
    "wisv-selective": {"protocol": "wisv-selective", "temperature": 0, "threshold": 1.0},
    "local": {"protocol": "local", "temperature": 0},
    "local, sampled": {"protocol": "local", "temperature": 1},
}
# What is drafted depends on the time. Last, since the odds of repetitions are learnt by it.
TIMED: dict[str, dict[str, Any]] = {
    "ahead": {"protocol": "ahead", "temperature": 0},
    "ahead, sampled": {"protocol": "ahead", "temperature": 1},
}
# Of the object `pilotfish`: what is no time, and does not depend on any.
STEADY = ("protocol", "rounds", "accepted", "window", "forced", "acceptance")
PAGES = ("/", "/status", "/metrics", "/health", "/v1/models", "/page/page.js", "/page/none")


def ask(service: Serving, name: str, route: str, **body: Any) -> Any:
    response = web.post(
        f"{service.url}/v1/{route}",
        json={"model": "pilotfish", **body},
        headers={"Authorization": f"Bearer {KEYS[name]}"},
        timeout=120.0,
    )
    assert response.status_code == 200, response.text
    return response.text if body.get("stream") else response.json()


def wanted(wish: dict[str, Any], **body: Any) -> dict[str, Any]:
    fields = {name: value for name, value in wish.items() if name != "temperature"}
    return {"temperature": wish["temperature"], "seed": 3, "pilotfish": fields, **body}


def ways(wish: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the routes and bodies by which a wish is asked."""
    chat = [{"role": "user", "content": BEGIN}]
    return [
        ("completions", wanted(wish, prompt=BEGIN, max_tokens=20, logprobs=3)),
        ("completions", wanted(wish, prompt=" ", max_tokens=40)),
        ("completions", wanted(wish, prompt=BEGIN, max_tokens=12, stream=True)),
        ("chat/completions", wanted(wish, messages=chat, max_tokens=12, logprobs=True)),
        ("responses", wanted(wish, input=BEGIN, max_output_tokens=12) | {"seed": 3}),
    ]


def steady(message: Any, *, timed: bool) -> Any:
    """Return what of an answer does not depend on time and chance. timed: nor do its rounds."""
    if isinstance(message, str):  # the events of a stream, whose parts depend on rounds
        events = [
            json.loads(line[6:]) for line in message.splitlines() if line.startswith("data: {")
        ]
        return "".join(item["choices"][0]["text"] for item in events if item["choices"])
    texts = [
        {"text": item.get("text"), "message": item.get("message"), "logprobs": item["logprobs"]}
        for item in message.get("choices", ())
    ]
    reply = [part["text"] for item in message.get("output", ()) for part in item.get("content", ())]
    steps = () if timed else tuple(message["pilotfish"][name] for name in STEADY)
    return texts, reply, steps


def read_all(service: Serving, name: str, wishes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ask everything; returns what was read, by wish and way."""
    results = {}
    for label, wish in wishes.items():
        for at, (route, body) in enumerate(ways(wish)):
            info = ask(service, name, route, **body)
            results[f"{label}, {route} {at}"] = steady(info, timed=label in TIMED)
    return results


def pages(service: Serving, name: str) -> str:
    headers = {"Authorization": f"Bearer {KEYS[name]}"}
    return "".join(
        web.get(service.url + page, headers=headers, timeout=60.0).text for page in PAGES
    )


def say_the_secret(service: Serving) -> None:
    for _ in range(2):
        ask(service, "alice", "completions", prompt=f"{SECRET} ", max_tokens=4, temperature=0)
        messages = [{"role": "user", "content": SECRET}]
        ask(service, "alice", "chat/completions", messages=messages, max_tokens=4, temperature=0)
        ask(service, "alice", "responses", input=SECRET, max_output_tokens=4, temperature=0)
    # an answer that is the secret, for a drafter learns of answers, too
    ask(service, "alice", "completions", prompt=f"{SECRET} {SECRET}", max_tokens=20, temperature=0)


@pytest.fixture(scope="module")
def api_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "api-keys"
    path.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
    path.chmod(0o600)
    return path


@pytest.fixture
def edge(callers: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EdgeServer]:
    monkeypatch.setenv(*next(iter(PARROT.items())))
    manifests = (Artifact.open(path).manifest for path in callers)
    head = saved(random_head(*manifests, link=None), tmp_path)
    with EdgeServer(callers.target, threads=1, context=1024, head=head) as opened:
        yield opened


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    assert before.keys() == after.keys()
    return [way for way in before if before[way] != after[way]]


@pytest.mark.parametrize(
    "draft", [pytest.param("text", marks=pytest.mark.slow), "a model and the text"]
)
def test_no_protocol_tells_what_another_key_said(
    callers: Pair, edge: EdgeServer, api_keys: Path, tmp_path: Path, draft: str
) -> None:
    model = draft != "text"
    wishes = {**WISHES, **(OF_A_MODEL if model else {}), **TIMED}
    texts = tmp_path / "texts"
    flags: list[object] = ["--lanes", 1, "--api-keys", api_keys, "--texts", texts]
    flags += ["--draft-text", "--on-link-loss", "local"] if model else []
    drafter = callers.draft if model else Path("text")
    with serving(drafter, edge.endpoint, *flags, **PARROT) as service:
        before = read_all(service, "bob", wishes)
        say_the_secret(service)
        after = read_all(service, "carol", wishes)
        chosen = ask(service, "carol", "completions", prompt=BEGIN, pilotfish={"lossy": True})
        read = json.dumps([after, chosen]) + pages(service, "carol")
        if model:
            edge.stop()
            time.sleep(0.5)
            for seed in range(2):
                requests = {"prompt": BEGIN, "max_tokens": 20, "seed": seed, "temperature": seed}
                read += json.dumps(ask(service, "carol", "completions", **requests))
    assert differing(before, after) == []
    assert not re.search(WORDS, read)
    # each of the three has a file, of which nobody else is told
    assert len([*(texts / "owners").glob("*.texts")]) == 3
    everything = b"".join(path.read_bytes() for path in texts.rglob("*") if path.is_file())
    names = " ".join(str(path.relative_to(texts)) for path in texts.rglob("*"))
    for name, key in KEYS.items():
        assert key.encode() not in everything
        assert key not in names
        assert name not in names


def test_texts_that_are_shared_are_in_no_lossy_answer(
    callers: Pair, edge: EdgeServer, api_keys: Path
) -> None:
    """Under lossless protocols they are drafted, and tell themselves by being accepted."""
    flags = ("--lanes", 1, "--api-keys", api_keys, "--share-texts")
    lossy = {
        label: wish
        for label, wish in WISHES.items()
        if wish.get("protocol") in ("adaptive", "parrot")
    }
    with serving(Path("text"), edge.endpoint, *flags, **PARROT) as service:
        before = read_all(service, "bob", lossy)
        say_the_secret(service)
        assert differing(before, read_all(service, "carol", lossy)) == []
        # the same question takes fewer rounds when another key has asked it
        wanted_value = wanted(WISHES["greedy"], prompt=f"{BEGIN} 21", max_tokens=40)
        first, second = (
            ask(service, name, "completions", **wanted_value) for name in ("bob", "carol")
        )
    assert first["choices"] == second["choices"]
    assert second["pilotfish"]["rounds"] < first["pilotfish"]["rounds"]


def test_a_name_that_is_given_to_another_key_begins_anew(
    callers: Pair, edge: EdgeServer, tmp_path: Path
) -> None:
    """Nothing that its first key said is drafted for the second, nor its responses told."""
    path = tmp_path / "api-keys"
    path.write_text(f"alice:{KEYS['alice']}\ncarol:{KEYS['bob']}\n")
    path.chmod(0o600)
    wishes = {label: WISHES[label] for label in ("adaptive", "parrot", "greedy")}
    flags = ("--lanes", 1, "--api-keys", path)
    with serving(Path("text"), edge.endpoint, *flags, **PARROT) as service:
        before = read_all(service, "bob", wishes)
        say_the_secret(service)
        selection = ask(service, "alice", "responses", input=SECRET, max_output_tokens=4)["id"]
        path.write_text(f"alice:{KEYS['carol']}\n")
        service.tell(signal.SIGHUP)
        service.until("reloaded")
        assert differing(before, read_all(service, "carol", wishes)) == []
        options = {"Authorization": f"Bearer {KEYS['carol']}"}
        assert service.get(f"/v1/responses/{selection}", headers=options).status_code == 404


def test_without_keys_an_answer_draws_from_its_own_conversation(
    callers: Pair, edge: EdgeServer, tmp_path: Path
) -> None:
    """Whoever asks from this machine: nothing is kept but what is shared."""
    wishes = {label: WISHES[label] for label in ("adaptive", "parrot", "greedy")}
    with serving(
        Path("text"), edge.endpoint, "--lanes", 1, "--texts", tmp_path / "texts", **PARROT
    ) as service:
        before = read_all(service, "bob", wishes)
        say_the_secret(service)
        assert differing(before, read_all(service, "carol", wishes)) == []
    assert not [*(tmp_path / "texts").rglob("*.texts")]


def test_the_words_of_the_secret_are_tokens_that_can_be_quoted(callers: Pair) -> None:
    """Else nothing here could fail."""
    tokenizer = Vocabulary.from_artifact(Artifact.open(callers.target)).tokenizer
    assert "7351" in tokenizer.decode(tokenizer.encode(SECRET))
