"""An edge of a build without `ahead`.

Load it in the edge's process by ``PILOTFISH_PROTOCOLS=tests.support.without_ahead``.
"""

from pilotfish.wire.protocols import PROTOCOL_REGISTRY

del PROTOCOL_REGISTRY["ahead"]
