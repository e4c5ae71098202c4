"""A protocol of another package that takes whatever is drafted, and says that it is lossy.

Register it in a process by ``PILOTFISH_PROTOCOLS=tests.support.lossy_protocol``.
"""

from __future__ import annotations

from typing import Any

from pilotfish.wire.protocols import Decision, Greedy, register


class Parrot(Greedy):
    name = "parrot"
    lossless = False

    def verify(self, draft: Any, *others: Any, **more: Any) -> Decision:
        """Accept all, and go on as the target would."""
        result = super().verify(draft, *others, **more)
        return result if not len(draft.ids) else result._replace(accepted=len(draft.ids))


register(Parrot())
