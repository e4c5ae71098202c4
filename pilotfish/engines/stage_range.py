"""The positions of stages in a model, and a check that stages form one whole model.

`pilotfish export split` cuts an artifact between layers into stages. A stage is an artifact with
some of the layers; the stages run one after the other. The first stage has the embedding and, as a
separate graph, the head. The last stage has the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec

from pilotfish.engines.engine_errors import ArtifactError

Count = Annotated[int, msgspec.Meta(ge=1)]


class StageRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The position of a stage in its model.

    index: number of the stage, from 1 to `count`. layers: number of layers, from layer
    `first_layer` (counted from 0) on. whole: digest of the artifact that was cut.
    """

    index: Count
    count: Count
    first_layer: Annotated[int, msgspec.Meta(ge=0)]
    layers: Count
    whole: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]

    @property
    def first(self) -> bool:
        """Whether this is the first stage, which reads tokens."""
        return self.index == 1

    @property
    def last(self) -> bool:
        """Whether this is the last stage, which has the final norm."""
        return self.index == self.count

    @property
    def end(self) -> int:
        """The index of the layer after the stage's last layer."""
        return self.first_layer + self.layers

    def __str__(self) -> str:
        last = self.end - 1
        layer_text = f"layer {last}" if self.layers == 1 else f"layers {self.first_layer}–{last}"
        return f"stage {self.index} of {self.count} ({layer_text})"


def check_chain(cuts: Sequence[StageRange]) -> None:
    """Raise `ArtifactError` unless these stages, in this order, form one whole model."""
    wanted = cuts[0].count if cuts else 1
    if [cut.index for cut in cuts] != list(range(1, wanted + 1)):
        indices = ", ".join(str(cut.index) for cut in cuts) or "none"
        raise ArtifactError(
            f"a model in {wanted} stages needs each of its stages in order, from the first to the "
            f"last, but got {indices}"
        )
    for before, following in pairwise(cuts):
        if (following.whole, following.count) != (before.whole, before.count):
            raise ArtifactError(
                f"{following} was cut from artifact {following.whole}, but {before} from "
                f"artifact {before.whole}: take the stages that one run of `pilotfish export "
                "split` has made"
            )
        if following.first_layer != before.end:
            raise ArtifactError(
                f"{following} does not begin where {before} ends: take the stages that one run "
                "of `pilotfish export split` has made"
            )
