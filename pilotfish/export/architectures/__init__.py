"""The architectures by `model_type` in config.json.

To add one, add an entry to a module's table.
"""

from __future__ import annotations

from pilotfish.export.architectures.architecture import Architecture, Gguf, Names
from pilotfish.export.architectures.biased_experts import BIASED_MIXTURES
from pilotfish.export.architectures.experts import MIXTURES
from pilotfish.export.architectures.gemma import GEMMAS
from pilotfish.export.architectures.llama import RELATIVES
from pilotfish.export.architectures.older import OLDER
from pilotfish.export.architectures.parallel import VARIANTS
from pilotfish.export.architectures.recurrent import RECURRENT
from pilotfish.export.architectures.state_spaces import STATE_SPACES

__all__ = ["ARCHITECTURES", "Architecture", "Gguf", "Names"]

ARCHITECTURES: dict[str, Architecture] = {
    **RELATIVES,
    **GEMMAS,
    **VARIANTS,
    **OLDER,
    **MIXTURES,
    **BIASED_MIXTURES,
    **RECURRENT,
    **STATE_SPACES,
}
