"""The source of a device's drafts: opened before the handshake, loaded afterwards.

In:  the name of a drafter: an artifact's folder, or "text". Out: its `Drafter`, its vocabulary, and
     its `Hello` to an edge.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.texts.text_memory import TextMemory
from pilotfish.drafting.lookup import Recollection
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.drafting.text_drafter import TEXT, TextDrafter
from pilotfish.drafting.window import Drafter
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire.messages import VERSION, Hello


@dataclass(frozen=True)
class DraftSource:
    """A drafter before it is loaded. artifact: None for "text". memory: None: no text drafts."""

    artifact: Artifact | None
    memory: TextMemory | None

    @classmethod
    def open(
        cls,
        draft: str | Path,
        *,
        text: bool,
        text_location: str | Path | None,
        shared: bool = False,
    ) -> DraftSource:
        """Open the drafter named ``draft``.

        text: True: a model also drafts by repeating earlier text. text_location, shared: see
        `TextMemory`. Raises the errors of `Artifact.open`, and `UnsupportedError` for unsuitable
        options.
        """
        alone = str(draft) == TEXT
        if text_location is not None and not (alone or text):
            raise UnsupportedError(
                "Only a drafter that drafts from texts keeps texts: use --draft text, or "
                "--draft-text."
            )
        memory = TextMemory(text_location, shared=shared) if alone or text else None
        return cls(None if alone else Artifact.open(draft), memory)

    @property
    def name(self) -> str:
        """Display name."""
        return TEXT if self.artifact is None else self.artifact.manifest.model

    @property
    def vocabulary(self) -> Vocabulary | None:
        """The drafter's vocabulary; None if it drafts in the vocabulary of any target."""
        return None if self.artifact is None else Vocabulary.from_artifact(self.artifact)

    @property
    def vocabulary_subset(self) -> NDArray[np.int64] | None:
        """The tokens i64 [N] that the drafter's head was cut to; None for a whole head."""
        return None if self.artifact is None else self.artifact.head_tokens

    @property
    def hello(self) -> Hello:
        """The drafter's greeting to an edge."""
        if self.artifact is None:
            return Hello(
                version=VERSION,
                tokenizer="",
                vocab_size=0,
                padded_vocab_size=0,
                hidden_size=0,
                bridges=True,
            )
        manifest = self.artifact.manifest
        return Hello(
            version=VERSION,
            tokenizer=manifest.tokenizer_fingerprint,
            vocab_size=manifest.vocab_size,
            padded_vocab_size=manifest.padded_vocab_size,
            hidden_size=manifest.dimensions.hidden,
            bridges=True,
            drafter=manifest.origin,
        )

    def load(
        self, *, provider: str, threads: int | None, context: int | None, lanes: int
    ) -> Drafter:
        """Load the drafter for this number of lanes; returns the first lane's drafter."""
        if self.artifact is None:
            assert self.memory is not None
            return TextDrafter(Recollection(self.memory))
        return ModelDrafter.open(
            self.artifact,
            provider=provider,
            threads=threads,
            context=context,
            lanes=lanes,
            text=None if self.memory is None else Recollection(self.memory),
        )
