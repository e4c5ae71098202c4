"""Files that a disk, a copy or an editor damaged: read as they are, or refused by one typed error.

Each file that a command loads is spoilt at random (bytes replaced, cut off, put in between) and
given to the real loader; and a process is started on some of them.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotfish.base.errors import ConfigError, HeadError, KeysError, PilotfishError, RelaxationError
from pilotfish.cli import parser
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.edge_runtime.relaxation_file import (
    Outcome,
    RelaxationCard,
    read_relaxation,
    write_relaxation,
)
from pilotfish.edge_runtime.targets.node_list import (
    Federation,
    Pipeline,
    read_addresses,
    read_node_list,
)
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ArtifactError, EngineError
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.engines.vocabulary import Vocabulary
from tests.conftest import Pair
from tests.support.small_heads import card, head

Load = Callable[[Path], object]
_TOKENS = (b"\0", b"\xff", b"\x1b[31m", b"\n", b'"', b"{", b"[" * 5000, b"9" * 5000, b"-", b"null")


def spoilt(data: bytes, rng: random.Random) -> bytes:
    """One to three places of a file changed."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 | 1:
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 2:
                data = data[:at] + rng.choice(_TOKENS) + data[at:]
            case 3:
                data = data[:at] + data[at + rng.choice([1, 4, 100]) :]
            case 4:
                data = data[: at if rng.random() < 0.3 else None]
    return data


def assert_read_or_refused(
    path: Path, load: Load, refusal: type[Exception] | tuple[type[Exception], ...], times: int
) -> None:
    """Whatever becomes of the file, it is read or refused; a message is one line that names it."""
    whole, rng = path.read_bytes(), random.Random(path.name)
    load(path)
    lines = []
    for _ in range(times):
        path.write_bytes(spoilt(whole, rng))
        try:
            load(path)
        except refusal as error:
            lines.append(str(error))
    assert len(lines) > times / 10
    assert [words for words in lines if len(words.splitlines()) != 1] == []
    assert [words for words in lines if path.stem not in words] == []
    path.write_bytes(whole)


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pilotfish", *map(str, words)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )


@pytest.fixture
def target(pair: Pair, tmp_path: Path) -> Path:
    """A copy of the target's artifact, to be damaged."""
    return Path(shutil.copytree(pair.target, tmp_path / "target"))


def test_spoilt_manifest(target: Path) -> None:
    assert_read_or_refused(
        target / "manifest.json", lambda path: Artifact.open(path.parent), ArtifactError, 600
    )


def test_spoilt_manifest_that_opens_loads_or_is_refused(target: Path) -> None:
    """Sizes that the graph does not have, names of files that are none."""
    path = target / "manifest.json"
    whole, rng = path.read_bytes(), random.Random(1)
    start = whole.index(b'"dimensions"')
    loaded, reply = 0, []
    for _ in range(60):
        at = rng.randrange(start, len(whole))
        path.write_bytes(whole[:at] + b"%d" % rng.randrange(10) + whole[at + 1 :])
        try:
            Decoder(Artifact.open(target), slots=2, context=64, threads=1, provider="cpu")
            loaded += 1
        except EngineError as error:
            reply.append(str(error))
    assert loaded
    assert reply
    assert [words for words in reply if len(words.splitlines()) != 1] == []


def test_spoilt_tokenizer(target: Path) -> None:
    def load(path: Path) -> None:
        tokenizer = Tokenizer(path)
        text = tokenizer.decode(tokenizer.encode("abc <|end|>", special=True), special=True)
        tokenizer.encode(text)
        assert len(tokenizer.fingerprint) == 64
        assert Vocabulary.from_artifact(Artifact.open(path.parent)).turn_end is not None

    assert_read_or_refused(target / "tokenizer.json", load, ArtifactError, 400)


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_spoilt_head(tmp_path: Path, suffix: str) -> None:
    path = head().save(tmp_path)
    assert_read_or_refused(
        path.with_suffix(f".{suffix}"), lambda _: DecisionHead.load(str(path)), HeadError, 300
    )


def test_spoilt_relaxation(tmp_path: Path) -> None:
    path = tmp_path / "relaxation.json"
    write_relaxation(path, RELAXATION)
    assert_read_or_refused(path, read_relaxation, RelaxationError, 300)


OUTCOME = Outcome(
    prompts=3,
    positions=9,
    strict=0.5,
    relaxed=0.6,
    deviation=0.1,
    key=0.2,
    strict_tokens=2.0,
    relaxed_tokens=2.5,
)
RELAXATION = RelaxationCard(
    tau=0.5,
    lambda1=1.5,
    lambda2=0.1,
    lambda3=0.2,
    budget=0.05,
    temperature=1.0,
    draft_top_k=8,
    window=4,
    max_tokens=16,
    seed=1,
    drafter=card().drafter,
    target=card().target,
    prompts_sha256="0" * 64,
    chosen=OUTCOME,
    kept_out=OUTCOME,
)
EDGE_TOML = b"""target = "model"
listen = "tcp://0.0.0.0:7077"
sessions = 3
idle = 1.5
head = ["a", "b"]
metrics = "127.0.0.1:9100"
threshold = 0.5
"""
DEVICE_TOML = b"""draft = "model"
edge = "tcp://127.0.0.1:7077"
lanes = 2
temperature = 0.5
listen = "127.0.0.1:8080"
"""
WORKERS_TOML = b"""late = "drop"
kept = 32
[[worker]]
address = "tcp://127.0.0.1:7078"
name = "a"
weight = 2.0
[[worker]]
address = "tcp://127.0.0.1:7079"
"""
STAGES_TOML = b"""states = "fp16"
[[stage]]
address = "tcp://127.0.0.1:7078"
"""


@pytest.mark.parametrize(
    ("words", "data"), [(("edge", "serve"), EDGE_TOML), (("device", "serve"), DEVICE_TOML)]
)
def test_spoilt_configuration(tmp_path: Path, words: tuple[str, ...], data: bytes) -> None:
    path = tmp_path / f"{words[0]}.toml"
    path.write_bytes(data)
    command = parser(words)
    assert_read_or_refused(
        path, lambda _: command.parse_args([*words, "--config", str(path)]), ConfigError, 500
    )


@pytest.mark.parametrize(("kind", "data"), [(Federation, WORKERS_TOML), (Pipeline, STAGES_TOML)])
def test_spoilt_list_of_nodes(
    tmp_path: Path, kind: type[Federation] | type[Pipeline], data: bytes
) -> None:
    path = tmp_path / "nodes.toml"
    path.write_bytes(data)

    def load(path: Path) -> None:
        node_list = read_node_list(path, kind)
        read_addresses(
            path, node_list.worker if isinstance(node_list, Federation) else node_list.stage
        )

    assert_read_or_refused(path, load, (ConfigError, KeysError), 500)


@pytest.mark.parametrize(
    "text",
    [
        "sessions = " + "9" * 5000,
        "sessions = " + "[" * 30_000,
        'target = "a\\u0000b"',
        "a." * 12_000 + "a = 1",
    ],
    ids=["digits", "nesting", "nul", "dots"],
)
def test_configuration_that_readers_stumble_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "edge.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"edge\.toml"):
        parser(["edge"]).parse_args(["edge", "serve", "--config", str(path)])


# As a command tells it


def first_name(data: bytes) -> bytes:
    at = data.index(b'"model": "') + 11
    return data[:at] + b"\xff" + data[at + 1 :]


def assert_ends(done: subprocess.CompletedProcess[str], code: int, path: Path) -> None:
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("pilotfish: ")
    assert len(done.stderr.splitlines()) == 1
    assert str(path) in done.stderr


@pytest.mark.parametrize("command", ["edge serve", "edge worker", "device serve", "device run a"])
def test_one_byte_of_the_manifest(target: Path, command: str) -> None:
    path = target / "manifest.json"
    path.write_bytes(first_name(path.read_bytes()))
    words = command.split()
    option = "--target" if words[0] == "edge" else "--draft"
    more = ("--protocol", "local") if words[1] == "run" else ("--listen", "127.0.0.1:0")
    if words[0] == "edge":
        more = ("--listen", "tcp://127.0.0.1:0")
    done = run(*words, option, target, *more)
    assert_ends(done, 66, path)
    assert "export the model again" in done.stderr


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json"])
def test_file_of_an_artifact_that_was_cut_short(target: Path, name: str) -> None:
    path = target / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    done = run("device", "run", "abc", "--draft", target, "--protocol", "local")
    assert_ends(done, 66, path)


def test_head_and_relaxation_of_a_command(pair: Pair, tmp_path: Path) -> None:
    path = head().save(tmp_path)
    relaxation = tmp_path / "relaxation.json"
    write_relaxation(relaxation, RELAXATION)
    relaxation.write_bytes(relaxation.read_bytes()[:-9])
    path.write_bytes(first_name(path.read_bytes()))
    serve = ("edge", "serve", "--target", pair.target, "--listen", "tcp://127.0.0.1:0")
    assert_ends(run(*serve, "--head", path), 66, path)
    assert_ends(run(*serve, "--relaxation", relaxation), 66, relaxation)


def test_no_error_of_the_wire_is_untyped() -> None:
    for kind in (HeadError, RelaxationError, ConfigError):
        assert issubclass(kind, PilotfishError)
        assert kind.exit_code in (66, 78)  # what the units do not try again
