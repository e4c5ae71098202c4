"""Access to the service: keys, what a browser may be made to send, reloading, configuration."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pilotfish import EdgeServer
from pilotfish.base.errors import KeysError
from pilotfish.base.extras import install_command
from pilotfish.cli import main
from pilotfish.device_runtime.service.access import ApiKeys, api_keys
from pilotfish.wire.keys import create as create_pair
from tests.conftest import Pair
from tests.support import web
from tests.support.serving import Serving, chat, serving

ALICE, BOB, CAROL = (f"{name}-0123456789abcdef" for name in ("alice", "bob", "carol"))


def key_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture(scope="module")
def everywhere(
    pair: Pair, edge: EdgeServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """A service on all interfaces."""
    keys = key_file(tmp_path_factory.mktemp("keys") / "api-keys", f"alice:{ALICE}\n{BOB}\n")
    flags = ("--listen", "0.0.0.0:0", "--api-keys", keys)
    with serving(pair.draft, edge.endpoint, *flags) as started:
        yield started


@pytest.mark.parametrize("key", [ALICE, BOB])
def test_clients_with_a_key_are_answered(everywhere: Serving, key: str) -> None:
    assert chat(everywhere.client(key)).choices
    assert everywhere.get("/status", headers={"Authorization": f"bearer {key}"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/status", "/v1/models/pilotfish"])
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", f"Bearer {ALICE}x", f"Basic {ALICE}", ALICE]
)
def test_clients_without_a_key_are_not(everywhere: Serving, path: str, header: str | None) -> None:
    answer = everywhere.get(path, headers={} if header is None else {"Authorization": header})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_openais_client_says_it_with_its_own_error(everywhere: Serving) -> None:
    with pytest.raises(openai.AuthenticationError):
        chat(everywhere.client("sk-guessed-0123456789"))
    key = {"headers": {"Authorization": f"Bearer {ALICE}"}}
    assert everywhere.metric('pilotfish_refusals_total{reason="key"', **key) >= 1


def test_the_page_and_health_are_for_everybody(everywhere: Serving) -> None:
    assert everywhere.get("/").status_code == 200
    health = everywhere.get("/health")
    assert health.status_code == 200
    assert health.json()["edge"]["state"] == "connected"
    assert "tcp://" not in health.text  # its address


def test_clear_text_beyond_loopback_is_warned_of(everywhere: Serving, service: Serving) -> None:
    assert any("clear text" in line and "--tls-cert" in line for line in everywhere.lines)
    assert not any("clear text" in line for line in service.lines)


def test_beyond_loopback_there_must_be_keys(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device", "serve", "--draft", str(pair.draft), "--listen", "0.0.0.0:0"]) == 71
    assert "--api-keys" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "mode", "word"),
    [
        (f"alice:{ALICE}\n", 0o604, "chmod"),
        ("# nobody\n\n", 0o600, "no key"),
        ("alice:short\n", 0o600, "line 1"),
        (f"alice:{ALICE}\n\nalice:{BOB}\n", 0o600, "line 3"),
        (f"al ice:{ALICE}\n", 0o600, "line 1"),
        (f"alice:{ALICE} \x00\n", 0o600, "line 1"),
        ("x" * 300_000, 0o600, "longer"),
    ],
)
def test_a_key_file_that_will_not_do(tmp_path: Path, text: str, mode: int, word: str) -> None:
    with pytest.raises(KeysError) as refused:
        ApiKeys.load(key_file(tmp_path / "api-keys", text, mode))
    assert word in str(refused.value)
    assert ALICE not in str(refused.value)
    with pytest.raises(KeysError):
        ApiKeys.load(tmp_path / "none")
    with pytest.raises(KeysError):
        ApiKeys.load(tmp_path)


def test_systemds_credentials_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_file(tmp_path / "api-keys", CAROL)
    named = key_file(tmp_path / "named", f"alice:{ALICE}")
    result = api_keys(named, "0.0.0.0:8080")
    assert result is not None
    alice = result.client(f"Bearer {ALICE}")
    assert alice is not None
    assert alice.name == "alice"
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    handed = api_keys(named, "0.0.0.0:8080")
    assert handed is not None
    assert handed.client(f"Bearer {ALICE}") is None
    carol = handed.client(f"Bearer {CAROL}")
    assert carol is not None
    assert carol.name.startswith("key-")
    (tmp_path / "api-keys").unlink()
    assert api_keys(None, "127.0.0.1:8080") is None


FOREIGN = [
    {"Host": "evil.example"},
    {"Host": "evil.example:8080"},
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "127.0.0.1@evil.example"},
    {"Host": "[::1"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://["},
    {"Origin": "http://127.0.0.1:1"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=lambda headers: "".join(headers.values()))
def test_without_keys_a_foreign_page_gets_nothing(
    service: Serving, headers: dict[str, str]
) -> None:
    for path in ("/", "/health", "/v1/models", "/status"):
        assert service.get(path, headers=headers).status_code == 403
    body = {"messages": [{"role": "user", "content": "x"}]}
    answer = web.post(f"{service.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "foreign_origin"


def test_no_answer_is_of_use_to_a_foreign_page(service: Serving, everywhere: Serving) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    answers = [
        *(service.get(path) for path in ("/", "/page/page.js", "/health", "/status", "/metrics")),
        *(service.get(path) for path in ("/v1/models", "/nowhere", "/v1/completions")),
        web.post(f"{service.url}/v1/completions", json=body),
        web.post(f"{service.url}/v1/completions", json={**body, "stream": True}),
        web.post(f"{service.url}/v1/completions", content=b"{"),
        everywhere.get("/v1/models"),
    ]
    assert {answer.status_code for answer in answers} == {200, 400, 401, 404, 405}
    for answer in answers:
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
        assert answer.headers.get_list("cross-origin-resource-policy") == ["same-origin"]
        assert "access-control-allow-origin" not in answer.headers


def test_the_services_own_page_may_ask(service: Serving) -> None:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        headers = {"Host": f"{host}:{service.port}", "Origin": f"http://{host}:{service.port}"}
        assert service.get("/status", headers=headers).status_code == 200


def test_reloading_changes_keys_and_edge_while_an_answer_runs(
    long_pair: Pair, tmp_path: Path
) -> None:
    keys = key_file(tmp_path / "api-keys", f"alice:{ALICE}\n")
    config = tmp_path / "device.toml"
    with (
        EdgeServer(long_pair.target, threads=1) as first,
        EdgeServer(long_pair.target, threads=1) as second,
    ):
        config.write_text(f'edge = "{first.endpoint}"\nmax-tokens = 7\n')
        flags = ("--config", config, "--api-keys", keys)
        with serving(long_pair.draft, None, *flags) as service:
            options: dict[str, Any] = {"temperature": 0, "max_tokens": 900}
            wanted = chat(service.client(ALICE), **options).choices[0].message.content
            chunks = chat(service.client(ALICE), stream=True, **options)
            got = [next(chunks) for _ in range(3)]
            key_file(keys, f"bob:{BOB}\n")
            config.write_text(f'edge = "{second.endpoint}"\nmax-tokens = 9\n')
            service.tell(signal.SIGHUP)
            service.until("reloaded")
            first.stop()
            with pytest.raises(openai.AuthenticationError):
                chat(service.client(ALICE))
            got += chunks
            assert "".join(item.choices[0].delta.content or "" for item in got) == wanted
            bob = service.client(BOB)
            answer = bob.chat.completions.create(
                model="pilotfish", messages=[{"role": "user", "content": "x"}]
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 9

            keys.chmod(0o644)  # what is broken changes nothing
            config.write_text(f'edge = "{first.endpoint}"\n')
            service.tell(signal.SIGHUP)
            service.until("nothing was reloaded")
            assert chat(bob).choices
            config.write_text("edge = [")
            service.tell(signal.SIGHUP)
            service.until("nothing was reloaded")
            assert chat(bob).choices


def test_a_key_that_was_taken_off_is_out_whatever_else_is_broken(
    pair: Pair, edge: EdgeServer, tmp_path: Path
) -> None:
    keys, other = tmp_path / "api-keys", tmp_path / "other-keys"
    config, folder = tmp_path / "device.toml", tmp_path / "keys"
    create_pair(folder, "device")
    shutil.copy(folder / "device.pub", folder / "edge.pub")
    sound = f'keys = "{folder}"\napi-keys = "{keys}"\n'

    def let_in(service: Serving) -> list[str]:
        def status(key: str) -> int:
            return service.get("/status", headers={"Authorization": f"Bearer {key}"}).status_code

        return [key for key in (ALICE, BOB, CAROL) if status(key) == 200]

    def reloaded(service: Serving, words: str) -> list[str]:
        service.tell(signal.SIGHUP)
        service.until(words)
        return let_in(service)

    key_file(keys, f"alice:{ALICE}\nbob:{BOB}\ncarol:{CAROL}\n")
    config.write_text(sound)
    with serving(pair.draft, None, "--config", config) as service:
        assert let_in(service) == [ALICE, BOB, CAROL]
        config.write_text("edge = [")
        key_file(keys, f"bob:{BOB}\ncarol:{CAROL}\n")
        assert reloaded(service, "device.toml") == [BOB, CAROL]
        config.write_text(sound)
        (folder / "edge.pub").write_text("")
        key_file(keys, f"carol:{CAROL}\n")
        assert reloaded(service, "edge.pub") == [CAROL]
        shutil.copy(folder / "device.pub", folder / "edge.pub")
        key_file(keys, f"alice:{ALICE}\nbob:{BOB[:4]}")  # the disk was full
        assert reloaded(service, "api-keys, line 2") == [ALICE]

        # another file is named: the one before does not come back when that breaks
        key_file(other, f"carol:{CAROL}\n")
        config.write_text(sound.replace(str(keys), str(other)) + "tls-cert = 1\n")
        assert reloaded(service, "reloaded except the API keys") == [CAROL]
        config.write_text("[")
        assert reloaded(service, "reloaded except the API keys") == [CAROL]
        other.unlink()
        assert reloaded(service, "nothing was reloaded: ") == [CAROL]
        key_file(other, "")
        assert reloaded(service, "holds no key") == []


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        (["--listen", "nowhere"], 71, "HOST:PORT"),
        (["--listen", "127.0.0.1:99999"], 71, "HOST:PORT"),
        (["--listen", "192.0.2.1:0", "--api-keys", "KEYS"], 71, "cannot listen"),
        (["--draft", "/nowhere"], 66, "/nowhere"),
        (["--protocol", "dsd"], 64, "--edge"),
        (["--edge", "tcp://192.0.2.1:7077"], 64, "keys"),
        (["--config", "/nowhere.toml"], 78, "/nowhere.toml"),
    ],
)
def test_a_service_that_cannot_start_says_why_in_a_line(
    pair: Pair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    code: int,
    word: str,
) -> None:
    keys = key_file(tmp_path / "api-keys", ALICE)
    flags = [str(keys) if flag == "KEYS" else flag for flag in flags]
    assert main(["device", "serve", "--draft", str(pair.draft), *flags]) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert word in err


def test_without_the_extra_a_line_says_what_to_install(pair: Pair) -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None; from pilotfish.cli import main; "
        f"sys.exit(main(['device', 'serve', '--draft', {str(pair.draft)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 64
    assert done.stderr.endswith(f"{install_command('serve')}.\n")


def test_device_run_needs_no_extra(pair: Pair) -> None:
    code = (
        "import sys; from pilotfish.cli import main\n"
        f"code = main(['device', 'run', '--draft', {str(pair.draft)!r}, '--protocol', 'local', "
        "'--max-tokens', '4', 'x'])\n"
        "loaded = {'starlette', 'uvicorn', 'prometheus_client'} & set(sys.modules)\n"
        "assert not loaded, loaded\nsys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
