"""Read the files that list the nodes of a federation or a pipeline (`docs/scale.md`).

In:  a TOML file; paths of keys in it are relative to the file. Out: typed settings. An invalid file
     raises `ConfigError`.
"""

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from pilotfish.base.errors import ConfigError
from pilotfish.base.reading import read_content, reading_file, without_bom
from pilotfish.edge_runtime.targets.node_client import NodeAddress
from pilotfish.speculation.ensemble import Scheme
from pilotfish.wire.keys import read_public
from pilotfish.wire.nodes import Ready

Positive = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Entry of one node.

    address: tcp://HOST:PORT. key: file with the node's public key. name: name in logs and metrics;
    default: the address. digest: required digest of the node's artifact; default: the digest that
    the artifact has when the edge starts.
    """

    address: str
    key: str = ""
    name: str = ""
    digest: str = ""


class WorkerEntry(NodeEntry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Entry of a worker in a federation; ``weight`` is relative to the others' weights."""

    weight: Positive = 1.0


class NodePatience(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time limits of a pass that waits for a node.

    late_s: seconds after which a node counts as late. give_up_s: seconds after which a pass fails.
    """

    late_s: Positive = 10.0
    give_up_s: Positive = 60.0

    def __post_init__(self) -> None:
        if self.late_s > self.give_up_s:
            raise ValueError(
                f"late_s is {self.late_s:g}, but must not exceed give_up_s, which is "
                f"{self.give_up_s:g}"
            )


_TopK = Annotated[int, msgspec.Meta(ge=1, lt=2**24)]
_RHO, _KEPT_LIMIT = 0.99, 4096  # defaults of rho and kept_limit under kept = "auto"


class Federation(NodePatience, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an ensemble of workers (specfed §II-III).

    late: policy for a late or lost worker: ``wait`` for the worker; ``drop`` the worker from the
    pass and renormalise the other weights; or ``fail`` the pass. kept: K, the number of tokens that
    a worker sends per row; ``auto``: as many as the retained mass ``rho`` needs, at most
    ``kept_limit``. values: format of their probabilities. reconstruction: scheme that
    rebuilds a worker's distribution: ``renormalise`` (5) gives the other tokens no probability;
    ``spread`` (6) gives them equal shares, which the edge also samples.
    """

    worker: Annotated[list[WorkerEntry], msgspec.Meta(min_length=1, max_length=64)]
    late: Literal["wait", "drop", "fail"] = "wait"
    kept: _TopK | Literal["auto"] = 64
    rho: Annotated[float, msgspec.Meta(gt=0.0, lt=1.0)] | None = None
    kept_limit: _TopK | None = None
    values: Literal["fp16", "fp32", "levels"] = "fp16"
    reconstruction: Scheme = "renormalise"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kept != "auto" and (self.rho, self.kept_limit) != (None, None):
            raise ValueError('rho and kept_limit can only be used together with kept = "auto"')

    @property
    def top_k(self) -> int:
        """K; under ``auto`` its upper limit."""
        return (self.kept_limit or _KEPT_LIMIT) if self.kept == "auto" else self.kept

    @property
    def mass(self) -> float:
        """The retained mass that a worker's rows need; 0.0: K is fixed."""
        return (self.rho or _RHO) if self.kept == "auto" else 0.0


class Pipeline(NodePatience, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a pipeline (decentralized §2.2).

    stage: nodes of the stages after stage 1; the edge itself runs stage 1. states: format of hidden
    states between stages; ``fp32`` is exact.
    """

    stage: Annotated[list[NodeEntry], msgspec.Meta(max_length=255)] = []
    states: Literal["fp32", "fp16", "int8", "int4"] = "fp32"


def lacks_room(ready: Ready, slots: int, context: int) -> str:
    """Describe a node's lack of slots or context, and the remedy; return "" if it has enough."""
    if ready.slots < slots:
        return (
            f"it has {ready.slots} slots, but this edge needs {slots}: start it with "
            f"--sessions {slots}"
        )
    if ready.context < context:
        return (
            f"it has room for {ready.context} tokens per slot, but this edge needs {context}: "
            f"start it with --context {context}, or the edge with --context {ready.context}"
        )
    return ""


_MOST_BYTES = 1 << 20

L = TypeVar("L", Federation, Pipeline)


def read_node_list(path: Path, kind: type[L]) -> L:
    """Read the settings in a file; raise `ConfigError` if the file is unreadable or invalid."""
    with reading_file(lambda problem: ConfigError(f"{path} cannot be read: {problem}.")):
        if path.stat().st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"{path} can be written by every user of this machine: run `chmod o-w {path}`."
            )
        data = without_bom(read_content(path, _MOST_BYTES))
    with reading_file(
        lambda problem: ConfigError(f"{path} is not valid: {problem}. See docs/scale.md.")
    ):
        return msgspec.toml.decode(data, type=kind)


def read_addresses(path: Path, nodes: Sequence[NodeEntry]) -> list[NodeAddress]:
    """Return the addresses of the nodes in the file ``path``.

    Raises `KeysError` for an invalid key file, `ConfigError` for a duplicate name or address.
    """
    addresses = [
        NodeAddress(
            node.name or node.address,
            node.address,
            read_public(path.parent / node.key) if node.key else b"",
        )
        for node in nodes
    ]
    if len({place.name for place in addresses}) < len(addresses):
        raise ConfigError(f"{path} uses the name of a node twice: give each node its own name.")
    if len({place.address for place in addresses}) < len(addresses):
        raise ConfigError(f"{path} lists an address twice: list each node once.")
    return addresses
