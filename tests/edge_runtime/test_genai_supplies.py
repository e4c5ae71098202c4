"""What an edge offers whose target's graph gives no hidden states and reads no trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish.base.errors import UnsupportedError
from pilotfish.edge_runtime.resources import EdgeResources
from tests.support.genai_folders import genai_artifact
from tests.support.small_heads import head


def test_a_head_is_refused_for_a_target_without_hidden_states(tmp_path: Path) -> None:
    blind, seeing = (
        genai_artifact(tmp_path / f"{each}", hidden_states=each).manifest for each in (False, True)
    )
    for manifest in (blind, seeing):
        target = head().card.target
        made = head(
            target=type(target)(
                model="tiny",
                origin=manifest.origin,
                hidden=manifest.dimensions.hidden,
                precision="genai",
            )
        )
        path = str(made.save(tmp_path / manifest.origin))
        if manifest is blind:
            with pytest.raises(UnsupportedError, match=r"no hidden states.*remove --head"):
                EdgeResources.load(manifest, [path], None)
        else:
            assert EdgeResources.load(manifest, [path], None).heads == ["tiny"]
        offered = EdgeResources.load(manifest, [], None).protocols("0" * 16, 6)
        assert "greedy" in offered
        assert "tree" not in offered
