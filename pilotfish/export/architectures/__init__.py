"""The architectures by `model_type` in config.json.

To add one, add an entry to a module's table. `known_keys` adds the keys and defaults of the class.
"""

from __future__ import annotations

from pilotfish.export.architectures.architecture import Architecture, Gguf, Names
from pilotfish.export.architectures.experts import MIXTURES
from pilotfish.export.architectures.gemma import GEMMAS
from pilotfish.export.architectures.known_keys import load_known_keys
from pilotfish.export.architectures.llama import RELATIVES
from pilotfish.export.architectures.older import OLDER
from pilotfish.export.architectures.parallel import VARIANTS
from pilotfish.export.architectures.recurrent import RECURRENT
from pilotfish.export.architectures.state_spaces import STATE_SPACES

__all__ = ["ARCHITECTURES", "Architecture", "Gguf", "Names"]

_TABLES: dict[str, Architecture] = {
    **RELATIVES,
    **GEMMAS,
    **VARIANTS,
    **OLDER,
    **MIXTURES,
    **RECURRENT,
    **STATE_SPACES,
}
_KNOWN, _UNKNOWN = load_known_keys()
ARCHITECTURES: dict[str, Architecture] = {
    model_type: architecture.with_keys(_KNOWN.get(model_type, _UNKNOWN))
    for model_type, architecture in _TABLES.items()
}
