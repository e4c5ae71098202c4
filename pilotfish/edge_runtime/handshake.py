"""Answer a device's `Hello`: refuse a device that cannot be served, or describe this edge.

In:  a `Hello`. Out: a `Welcome` with the target's vocabulary, pass times, protocols and limits.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish.base.errors import PairMismatchError, VersionMismatchError
from pilotfish.base.version import SOFTWARE
from pilotfish.edge_runtime.edge_config import MEBIBYTE, EdgeLimits
from pilotfish.edge_runtime.resources import EdgeResources
from pilotfish.edge_runtime.vocabulary_server import VocabularyServer
from pilotfish.engines.manifest import Manifest
from pilotfish.wire import messages as m
from pilotfish.wire.link.tcp import is_paced
from pilotfish.wire.protocols import STREAM


def limits_for_devices(limits: EdgeLimits, manifest: Manifest, context: int) -> m.Limits:
    """Return the limits in the edge's `Welcome`. context: positions of a slot of the target."""
    states = manifest.states
    return m.Limits(
        context=context,
        window=limits.window if states is None else min(limits.window, states.window),
        message_bytes=limits.message_mib * MEBIBYTE,
        sessions=limits.sessions_per_client,
    )


@dataclass(frozen=True)
class Handshake:
    """What this edge tells devices about itself.

    digest: identity of the target (hex). pass_times, drafter_pass_times: pass times of the target,
    and of the edge drafter. traces: whether the edge makes traces.
    """

    manifest: Manifest
    digest: str
    limits: m.Limits
    resources: EdgeResources
    vocabulary_server: VocabularyServer
    pass_times: Sequence[m.PassTime]
    drafter_pass_times: Sequence[m.PassTime]
    traces: bool

    def welcome(self, hello: m.Hello, received_ns: int) -> m.Welcome:
        """Return the reply to a device.

        Raises `VersionMismatchError` for another version of the wire protocol, `PairMismatchError`
        for a drafter of another vocabulary that the device cannot bridge.
        """
        manifest = self.manifest
        if hello.version != m.VERSION:
            raise VersionMismatchError(
                f"The device uses version {hello.version} of the wire protocol, but this edge "
                f"uses version {m.VERSION}: install the same Pilotfish release on both."
            )
        if hello.tokenizer != manifest.tokenizer_fingerprint and not hello.bridges:
            raise PairMismatchError(
                f"The drafter's vocabulary ({hello.vocab_size} tokens) differs from the "
                "vocabulary of the target "
                f"{manifest.model} ({manifest.vocab_size} tokens), and the device does not bridge "
                "vocabularies: use a drafter of the same family."
            )
        return m.Welcome(
            version=m.VERSION,
            software=SOFTWARE,
            model=manifest.model,
            vocab_size=manifest.vocab_size,
            padded_vocab_size=manifest.padded_vocab_size,
            hidden_size=manifest.dimensions.hidden,
            eos_ids=manifest.eos_ids,
            protocols=[*self.resources.protocols(hello.drafter, hello.hidden_size), STREAM],
            limits=self.limits,
            received_ns=received_ns,
            sent_ns=time.monotonic_ns(),
            passes=list(self.pass_times),
            digest=self.digest,
            tokenizer=manifest.tokenizer_fingerprint,
            vocabulary=self.vocabulary_server.digest,
            vocabulary_bytes=self.vocabulary_server.size,
            drafts=list(self.drafter_pass_times),
            paced=is_paced(),
            traces=self.traces,
        )
