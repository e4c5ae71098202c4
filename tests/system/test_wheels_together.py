"""An older release together with this one, in both orders of upgrade.

Either the answers are equal, or each side hears a sentence that says what to install; nothing hangs
and there is no traceback. "foreign" is the older release with version numbers that no release has:
there the sentence is certain, so this way is tested even while both releases speak the same wire.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.releases import (
    ADVICE,
    ROOT,
    Daemon,
    Release,
    checkout_of,
    daemon,
    unpacked_wheel,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMIT = "119d5a438fc4c6e1aad12052442475152e9ca0ee"  # before the engine took whole sequences
FOREIGN = "99"  # number of a wire version that no release has
VERSIONS = ("pilotfish/wire/messages.py", "pilotfish/wire/nodes.py")
LOOPBACK = ("--listen", "tcp://127.0.0.1:0", "--threads", 1)
PROTOCOLS = ("greedy", "dsd", "tslt", "tree", "dssd", "coupled", "adaptive", "stream", "ahead")
# What a protocol draws from q̂ changed since that commit: its levels are finer where the mass is.
DRAWN_ANEW = ("tslt", "tree", "adaptive")
PAIRS = [("old", "new"), ("new", "old"), ("foreign", "new"), ("new", "foreign")]
IDS = [f"{first}-{second}" for first, second in PAIRS]

# Made by the older release: newer ones still read its artifacts.
MAKE_MODELS = """
import sys
from pathlib import Path
from pilotfish.export.split import split_artifact
from tests.support.tiny import tiny_artifact
folder = Path(sys.argv[1])
sizes = dict(vocab=64, padded_vocab=72, context=256, seed=1, dialect="opset17", layers=4)
tiny_artifact(folder / "draft", sharpness=0.9, **sizes)
tiny_artifact(folder / "target", sharpness=0.7, **sizes)
split_artifact(folder / "target", folder / "stages", stages=2)
"""
# Prints the tokens of an answer of each protocol. The public API alone, so all releases have it.
ANSWER = """
import json, sys
from pilotfish import Device
draft, endpoint, *protocols = sys.argv[1:]
with Device(draft, endpoint, threads=1) as device:
    for protocol in protocols:
        heat = 0.0 if protocol == "greedy" else 1.0
        options = dict(protocol=protocol, seed=7, temperature=heat, max_tokens=24)
        if protocol != "stream":
            options["window"] = 3
        answers = [list(map(int, device.generate(p, **options).tokens)) for p in ("ab", "ab cd")]
        print(json.dumps([protocol, answers]))
"""


class Setting(NamedTuple):
    """The releases by name, the models, and a folder for logs."""

    releases: dict[str, Release]
    models: Path
    folder: Path

    def device(self, name: str, endpoint: str, *protocols: str) -> dict[str, Any] | str:
        """Return the answers of a device of this release, or the sentence that it prints."""
        release, draft = self.releases[name], self.models / "draft"
        words = ("--draft", draft, "--edge", endpoint, "--protocol", protocols[0], "--threads", 1)
        command = ("-m", "pilotfish", "device", "run", "ab", *words, "--max-tokens", 8)
        done = release.run(*command, folder=self.folder)
        assert "Traceback" not in done.stderr
        if done.returncode:
            [sentence] = done.stderr.strip().splitlines()
            assert sentence.startswith("pilotfish: ")
            assert done.stdout == ""
            return sentence
        done = release.run("-c", ANSWER, draft, endpoint, *protocols, folder=self.folder)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(line) for line in done.stdout.splitlines())

    def edge(self, name: str, target: str = "target", *words: object) -> Any:
        """Run an edge of this release."""
        command = ("edge", "serve", "--target", self.models / target, *LOOPBACK, *words)
        return daemon(self.releases[name], self.folder, *command)

    def node(self, name: str, target: str) -> Any:
        """Run a worker or a stage of this release."""
        command = ("edge", "worker", "--target", self.models / target, *LOOPBACK)
        return daemon(self.releases[name], self.folder, *command)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("releases")
    checkout = checkout_of(COMMIT, folder / "checkout")
    old = unpacked_wheel(checkout, folder)
    foreign = folder / "foreign"
    shutil.copytree(old, foreign)
    for name in VERSIONS:
        text = (foreign / name).read_text()
        changed = re.sub(r"^VERSION: Final = \d+", f"VERSION: Final = {FOREIGN}", text, flags=re.M)
        assert changed != text
        (foreign / name).write_text(changed)
    made = Release("old", checkout).run("-c", MAKE_MODELS, folder / "models", folder=checkout)
    assert made.returncode == 0, made.stderr
    (folder / "work").mkdir()
    # the checkout's own package alone, as a wheel would have it, without the rest of the checkout
    (folder / "new").mkdir()
    (folder / "new/pilotfish").symlink_to(ROOT / "pilotfish")
    folders = {"old": old, "foreign": foreign, "new": folder / "new"}
    releases = {name: Release(name, path) for name, path in folders.items()}
    return Setting(releases, folder / "models", folder / "work")


@pytest.fixture(scope="module")
def answers(setting: Setting) -> dict[str, dict[str, Any]]:
    """The answers when both ends are of one release, for this release and the older one."""
    results = {}
    for name in ("old", "new"):
        with setting.edge(name) as edge:
            result = setting.device(name, edge.address(), *PROTOCOLS)
        assert isinstance(result, dict)
        assert list(result) == list(PROTOCOLS)
        assert all(all(each) for each in result.values())
        results[name] = result
    for protocol in PROTOCOLS:
        if protocol not in DRAWN_ANEW:
            assert results["old"][protocol] == results["new"][protocol]
    return results


def test_each_process_imports_its_own_release(setting: Setting) -> None:
    for release in setting.releases.values():
        code = "import pilotfish.wire.messages as m; print(m.__file__, m.VERSION)"
        path, version = release.run("-c", code, folder=setting.folder).stdout.split()
        assert Path(path).is_relative_to(release.folder)
        assert (version == FOREIGN) == (release.name == "foreign")


@pytest.mark.parametrize(("device", "edge"), PAIRS, ids=IDS)
def test_device_and_edge(
    setting: Setting, answers: dict[str, dict[str, Any]], device: str, edge: str
) -> None:
    with setting.edge(edge) as serving:
        endpoint = serving.address()
        result = setting.device(device, endpoint, *PROTOCOLS)
        if isinstance(result, str):
            assert ADVICE.search(result), result
            # the edge serves on: a device of its own release is answered
            result = setting.device(edge, endpoint, *PROTOCOLS)
        else:
            assert "foreign" not in (device, edge), "another version of the wire was accepted"
        assert result == answers["new" if edge == "new" else "old"]


class Cluster(NamedTuple):
    """An edge on nodes; the edge may still wait for them."""

    nodes: list[Daemon]
    edge: Daemon


def start_cluster(setting: Setting, stack: ExitStack, kind: str, node: str, edge: str) -> Cluster:
    """Start two workers of a federation, or the second stage of a pipeline, and their edge."""
    targets = ["target", "target"] if kind == "worker" else ["stages/stage-2"]
    nodes = [stack.enter_context(setting.node(node, target)) for target in targets]
    lines = []
    for number, each in enumerate(nodes):
        lines += [f"[[{kind}]]", f'name = "n{number}"', f'address = "{each.address()}"']
    path = setting.folder / f"{kind}-{node}-{edge}.toml"
    path.write_text("\n".join(lines) + "\n")
    flag, target = (
        ("--federate", "target") if kind == "worker" else ("--pipeline", "stages/stage-1")
    )
    return Cluster(nodes, stack.enter_context(setting.edge(edge, target, flag, path)))


@pytest.fixture(scope="module", params=["worker", "stage"])
def cluster_kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(scope="module")
def cluster_answers(setting: Setting, cluster_kind: str) -> dict[str, Any]:
    """The answers of an edge on nodes when all are of this release."""
    with ExitStack() as stack:
        cluster = start_cluster(setting, stack, cluster_kind, "new", "new")
        result = setting.device("new", cluster.edge.address(), "greedy", "tree", "coupled")
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize(("node", "edge"), PAIRS, ids=IDS)
def test_node_and_edge(
    setting: Setting, cluster_kind: str, cluster_answers: dict[str, Any], node: str, edge: str
) -> None:
    with ExitStack() as stack:
        cluster = start_cluster(setting, stack, cluster_kind, node, edge)
        match = cluster.edge.await_log(r"serves on (\S+)\s", ADVICE)
        if match.re is not ADVICE:
            assert "foreign" not in (node, edge), "another version of the wire was accepted"
            result = setting.device(edge, match[1], "greedy", "tree", "coupled")
            assert result == cluster_answers
