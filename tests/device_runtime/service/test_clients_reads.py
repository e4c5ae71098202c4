"""What clients read beside the answer: models, timings, usage, HEAD; and browsers' origins."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotfish.cli import main
from tests.conftest import Pair
from tests.support import web
from tests.support.serving import Serving, eventually, serving

APP, SITE = "app://obsidian.md", "https://chat.example:8443"
KEY = "alice-0123456789abcdef"
SAY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def open_service(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A service without keys that two origins may use."""
    with serving(
        pair.draft, None, "--lanes", 1, "--allow-origin", APP, "--allow-origin", SITE
    ) as started:
        yield started


@pytest.fixture(scope="module")
def keyed(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A service with keys that all origins may use."""
    keys = tmp_path_factory.mktemp("keys") / "api-keys"
    keys.write_text(f"alice:{KEY}\n")
    keys.chmod(0o600)
    with serving(
        pair.draft, None, "--lanes", 1, "--allow-origin", "*", "--api-keys", keys
    ) as started:
        yield started


def say(service: Serving, **headers: str) -> httpx.Response:
    return web.post(f"{service.url}/v1/chat/completions", json=SAY, headers=headers, timeout=60.0)


def preflight(service: Serving, origin: str, **more: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
        **more,
    }
    return web.request("OPTIONS", f"{service.url}/v1/chat/completions", headers=headers)


@pytest.mark.parametrize("origin", [APP, SITE, SITE.upper()])
def test_pages_of_an_allowed_origin_may_ask_and_read(open_service: Serving, origin: str) -> None:
    allowed = preflight(open_service, origin, **{"Access-Control-Request-Private-Network": "true"})
    assert allowed.status_code == 204
    assert allowed.headers["access-control-allow-origin"] == origin
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]
    assert allowed.headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-credentials" not in allowed.headers
    answer = say(open_service, Origin=origin)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert "x-pilotfish-ignored" in answer.headers["access-control-expose-headers"]
    assert answer.headers["vary"] == "origin"
    refused = open_service.get("/nowhere", headers={"Origin": origin})
    assert refused.status_code == 404
    assert refused.headers["access-control-allow-origin"] == origin  # the page may read why


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://chat.example", "null", f"{SITE}.evil.example", "*"]
)
def test_pages_of_other_origins_get_nothing(open_service: Serving, origin: str) -> None:
    for answer in (say(open_service, Origin=origin), preflight(open_service, origin)):
        assert answer.status_code == 403
        assert not any(name.startswith("access-control") for name in answer.headers)


def test_an_allowed_page_still_needs_a_loopback_name(open_service: Serving) -> None:
    for answer in (
        say(open_service, Origin=SITE, Host="evil.example"),
        preflight(open_service, SITE, Host="evil.example"),
    ):
        assert answer.status_code == 403


def test_without_the_flag_no_foreign_page_gets_anything(service: Serving) -> None:
    assert preflight(service, SITE).status_code == 403
    same_origin = preflight(service, service.url)
    assert same_origin.status_code == 405
    assert "access-control-allow-origin" not in same_origin.headers


def test_any_page_needs_a_key_where_there_are_keys(keyed: Serving) -> None:
    origin = "https://anything.example"
    assert preflight(keyed, origin).status_code == 204
    refused = say(keyed, Origin=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
    assert say(keyed, Origin=origin, Authorization=f"Bearer {KEY}").status_code == 200
    plain = web.request("OPTIONS", f"{keyed.url}/v1/models", headers={"Origin": origin})
    assert plain.status_code == 405


def test_headers_of_a_preflight_are_not_repeated_blindly(open_service: Serving) -> None:
    odd = preflight(open_service, SITE, **{"Access-Control-Request-Headers": "a b;c"})
    assert odd.headers["access-control-allow-headers"] == "authorization, content-type"


@pytest.mark.parametrize("origin", ["chat.example", f"{SITE}/", "https://a b", "http://"])
def test_what_is_no_origin_ends_the_start(
    pair: Pair, origin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--draft", str(pair.draft), "--listen", "127.0.0.1:0", "--allow-origin", origin]
    assert main(["device", "serve", *flags]) == 71
    assert "is not an origin" in capsys.readouterr().err


def test_a_reload_changes_origins_and_strictness(pair: Pair, tmp_path: Path) -> None:
    config = tmp_path / "device.toml"
    config.write_text("strict = true\n")
    with serving(pair.draft, None, "--lanes", 1, "--config", config) as started:
        assert preflight(started, SITE).status_code == 403
        odd = {**SAY, "nonsense": 1}
        assert web.post(f"{started.url}/v1/chat/completions", json=odd).status_code == 400
        config.write_text(f'allow-origin = ["{SITE}"]\n')
        started.tell(signal.SIGHUP)
        eventually(lambda: preflight(started, SITE).status_code == 204)
        assert web.post(f"{started.url}/v1/chat/completions", json=odd).status_code == 200
        assert not any("every page" in line for line in started.lines)
        config.write_text('allow-origin = ["*"]\n')
        started.tell(signal.SIGHUP)
        started.until("every page in this machine's browsers can use the service")


@pytest.mark.parametrize(
    "path", ["/", "/health", "/status", "/metrics", "/v1/models", "/v1/models/pilotfish"]
)
def test_head_is_get_without_a_body(service: Serving, path: str) -> None:
    head = web.request("HEAD", service.url + path)
    got = service.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


def test_a_model_has_what_clients_read(service: Serving) -> None:
    (model,) = service.get("/v1/models").json()["data"]
    assert model == service.get(f"/v1/models/{model['id']}").json()
    assert model["max_model_len"] == model["context_length"] == 256
    assert (model["object"], model["owned_by"], model["root"]) == (
        "model", "pilotfish", model["id"]
    )  # fmt: skip
    assert "chat" in model["capabilities"]


def timings_of(service: Serving, *, stream: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The timings and the usage of an answer."""
    create: Any = service.client().chat.completions.create
    answers = create(
        model="pilotfish",
        stream=stream,
        stream_options={"include_usage": True} if stream else None,
        extra_body={"pilotfish": {"protocol": "greedy", "window": 4}},
        **SAY,
    )
    if stream:
        chunks = [chunk.model_dump() for chunk in answers]
        assert "timings" not in chunks[0]
        assert chunks[-1]["timings"] == chunks[-2]["timings"]
        return chunks[-1]["timings"], chunks[-1]["usage"]
    whole = answers.model_dump()
    return whole["timings"], whole["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_timings_are_as_llama_cpp_has_them(service: Serving, stream: bool) -> None:
    timings, usage = timings_of(service, stream=stream)
    assert timings["predicted_n"] == usage["completion_tokens"] == 8
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert 0 < timings["prompt_ms"] < 60_000
    assert 0 < timings["predicted_ms"] < 60_000
    speed = timings["predicted_n"] / timings["predicted_ms"] * 1e3
    assert timings["predicted_per_second"] == pytest.approx(speed, rel=0.01)
    assert 0 <= timings["draft_n_accepted"] <= timings["draft_n"] > 0
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_a_prompt_that_was_read_before_is_cached(open_service: Serving) -> None:
    prompts = ["once upon a hello", "once upon a hello"]
    body = {"prompt": prompts, "max_tokens": 2, "temperature": 0}
    first = web.post(f"{open_service.url}/v1/completions", json={**body, "prompt": ["zebra"]})
    assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] <= 1
    usage = web.post(f"{open_service.url}/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] // 2
