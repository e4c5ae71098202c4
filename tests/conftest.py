"""A tiny pair of models and a few edges, shared by all tests that need an edge at all."""

from __future__ import annotations

import fcntl
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import settings

from pilotfish import Device, EdgeServer
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cache import cache_directory
from pilotfish.wire import keys
from tests.support import forking
from tests.support.judging import random_head, saved
from tests.support.measuring import PROMPTS
from tests.support.reaper import Reaper, own_mounts
from tests.support.rooms import room_of
from tests.support.tiny import tiny_artifact, tiny_pair

if TYPE_CHECKING:
    from tests.support.serving import Serving

# A shell that runs the tests in the background makes them, and so all their children, deaf to
# Ctrl-C; what some of these tests are about.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more about the machine than about the code.
settings.register_profile("pilotfish", deadline=None, max_examples=20)
settings.register_profile("thorough", deadline=None)  # of `make test-all`
settings.load_profile("pilotfish")

TESTS = Path(__file__).parent
ROOMS = sorted(
    {room_of(path.relative_to(TESTS).as_posix()) for path in TESTS.glob("*/**/__init__.py")}
)

REAPER = pytest.StashKey[Reaper]()
VOCAB = 64
PADDED_VOCAB = 72
CONTEXT = 256
HIDDEN = 64  # d of both models' states


def pytest_configure(config: pytest.Config) -> None:
    """Each room is a marker: ``-m "slow and deploy"``. No process or mount outlives the run."""
    for room in ROOMS:
        config.addinivalue_line("markers", f"{room}: tests of this room")
    own_mounts()
    config.stash[REAPER] = Reaper()
    forking.install()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what the tests have left, and this process's own trial of grammars."""
    if (module := sys.modules.get("pilotfish.engines.grammar_trial")) is not None:
        module.TRIAL.end()  # by itself it ends with the interpreter, after the reaper looks
    forking.uninstall()
    config.stash[REAPER].close()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test with its room."""
    if (room := room_of(item.path.relative_to(TESTS).as_posix())) in ROOMS:
        item.add_marker(room)


class Pair(NamedTuple):
    """Artifact folders of a drafter and its target."""

    draft: Path
    target: Path


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Random weights; alike enough that about half of the drafts are accepted."""
    sizes = {"vocab": VOCAB, "padded_vocab": PADDED_VOCAB, "context": CONTEXT}
    return Pair(*tiny_pair(tmp_path_factory.mktemp("pair"), **sizes))


@contextmanager
def exporting() -> Iterator[None]:
    """Lock the cache of artifacts: each is exported once, though several processes want it."""
    cache_directory().mkdir(parents=True, exist_ok=True)
    with (cache_directory() / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def default_artifacts() -> Pair:
    """The default model as drafter and target."""
    from pilotfish.cli.export import default_pair

    with exporting():
        return Pair(*default_pair())


@pytest.fixture(scope="session")
def drafter_named() -> Callable[[str], Path]:
    """A function from the name of a default drafter, as a `Paper` states it, to its artifact."""
    from pilotfish.cli.default_models import drafter_folder

    def export(name: str) -> Path:
        with exporting():
            return drafter_folder(Path(name))

    return export


@pytest.fixture(scope="session")
def head(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random decision head for the pair, for ``--head``; it does not look at the link."""
    manifests = (Artifact.open(path).manifest for path in pair)
    return saved(random_head(*manifests, link=None), tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="session")
def edge(pair: Pair, head: str) -> Iterator[EdgeServer]:
    """An edge on loopback, without keys; what tests abandon there may stay."""
    with EdgeServer(pair.target, sessions=200, threads=1, head=head) as server:
        yield server


@pytest.fixture(scope="session")
def device(pair: Pair, edge: EdgeServer) -> Iterator[Device]:
    """A well-behaved device on that edge."""
    with Device(pair.draft, edge.endpoint, threads=1) as opened:
        yield opened


@pytest.fixture(scope="session")
def service(pair: Pair, edge: EdgeServer) -> Iterator[Serving]:
    """A device service on loopback, shared by all tests, with three lanes."""
    from tests.support.serving import serving  # OpenAI's client takes a while to import

    with serving(pair.draft, edge.endpoint, "--lanes", 3) as started:
        yield started


@pytest.fixture(scope="session")
def key_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Keys of an edge, of two devices that it lets in, and of one that it does not."""
    root = tmp_path_factory.mktemp("keys")
    folders = {name: root / name for name in ("edge", "alice", "bob", "eve")}
    edge_public = keys.create(folders["edge"], keys.EDGE)
    for name in ("alice", "bob", "eve"):
        public = keys.create(folders[name], keys.DEVICE)
        (folders[name] / "edge.pub").write_bytes(edge_public.read_bytes())
        if name != "eve":
            keys.allow(folders["edge"], public, name)
    return folders


@pytest.fixture(scope="session")
def locked_edge(pair: Pair, key_folders: dict[str, Path]) -> Iterator[EdgeServer]:
    """An edge that lets Alice and Bob in."""
    with EdgeServer(pair.target, keys=key_folders["edge"], threads=1) as server:
        yield server


@pytest.fixture(scope="session")
def long_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny pair that never comes to an end by itself."""
    folder = tmp_path_factory.mktemp("long")
    for name, sharpness in (("draft", 0.9), ("target", 0.7)):
        artifact = tiny_artifact(
            folder / name, vocab=64, seed=1, context=32768, sharpness=sharpness
        )
        path = artifact.path / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_ids": []}))
    return Pair(folder / "draft", folder / "target")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a run file shall be."""
    return tmp_path / "walk.pilotfish"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of three prompts."""
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n")
    return path
