"""Open a drafter and its target: their artifacts and vocabularies, and an edge for the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pilotfish.base.errors import UnsupportedError
from pilotfish.bridge import Pair, Prompt
from pilotfish.device_runtime.draft_source import DraftSource
from pilotfish.edge_runtime.process import EdgeServer
from pilotfish.engines.artifact import Artifact, check_head
from pilotfish.engines.vocabulary import Vocabulary

_DRAFT_TOKENS_PER_TOKEN = 2  # upper bound of the drafter tokens per target token, in ordinary text


class OpenPair:
    """The opened artifacts of a drafter and a target.

    paths: the artifacts' folders. drafter, target: the artifacts' manifests. context: the smaller
    context, tokens.
    """

    def __init__(self, draft: Path, target: Path) -> None:
        self.paths = draft, target
        artifacts = [Artifact.open(path) for path in self.paths]
        self.drafter, self.target = (artifact.manifest for artifact in artifacts)
        check_head(artifacts[1])
        draft_vocabulary, target_vocabulary = (
            Vocabulary.from_artifact(artifact) for artifact in artifacts
        )
        self.vocabularies = Pair(draft_vocabulary, target_vocabulary, artifacts[0].head_tokens)
        self.context = min(artifact.manifest.dimensions.context for artifact in artifacts)

    def require_hidden_states(self) -> None:
        """Raise `UnsupportedError` if a model's graph does not output hidden states."""
        for manifest in (self.drafter, self.target):
            if not manifest.hidden_states:
                raise UnsupportedError(
                    f"The graph of {manifest.model} outputs no hidden states, which decision "
                    f"heads need: build the graph with hidden states, or export the checkpoint "
                    f"itself."
                )


def pair_vocabularies(source: DraftSource, target: Vocabulary) -> Pair:
    """Pair a drafter with a target's vocabulary.

    Raises `PairMismatchError` if the drafter shares no token with the target.
    """
    return Pair(source.vocabulary or target, target, source.vocabulary_subset)


def most_tokens(prompt: Prompt, pair: Pair, most: int) -> int:
    """Return an upper bound of a text's length in tokens of either model.

    The text is the prompt and an answer of ``most`` target tokens.
    """
    draft_tokens = most if pair.trivial else _DRAFT_TOKENS_PER_TOKEN * most
    return max(len(prompt.ids) + most, len(prompt.draft_ids) + draft_tokens)


@contextmanager
def serving(target: Path, *, threads: int | None, **options: Any) -> Iterator[str]:
    """Run an edge with this target inside the ``with`` block; yield its address.

    threads: threads of a pass; None: the edge's default. options: further options of `EdgeServer`.
    """
    if threads is not None:
        options["threads"] = threads
    with EdgeServer(target, **options) as server:
        yield server.endpoint
