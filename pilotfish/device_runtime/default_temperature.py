"""The temperature of a request that states none: 1, as in OpenAI's API, or 0.

It is 0 if all drafting protocols that the request allows decode at temperature 0 alone. So a client
of a service need not know the protocol. A `Request` states no temperature if its value is None.
"""

from collections.abc import Sequence

from msgspec import structs

from pilotfish.device_runtime.choice import POLICIES
from pilotfish.wire.protocols import PROTOCOL_REGISTRY
from pilotfish.wire.request import AUTO, Request

OPENAI_TEMPERATURE = 1.0


def with_default_temperature(request: Request) -> Request:
    """Return the request with a temperature: its own, or else its protocol's or policy's."""
    if request.temperature is not None:
        return request
    drafting = [PROTOCOL_REGISTRY[name] for name in _allowed(request) if name in PROTOCOL_REGISTRY]
    greedy = bool(drafting) and all(protocol.greedy_only for protocol in drafting)
    return structs.replace(request, temperature=0.0 if greedy else OPENAI_TEMPERATURE)


def greedy_names() -> Sequence[str]:
    """Return the protocols and policies whose default temperature is 0."""
    greedy = [name for name, protocol in PROTOCOL_REGISTRY.items() if protocol.greedy_only]
    policies = (
        f"policy {name}"
        for name, policy in POLICIES.items()
        if policy.protocols and {*policy.protocols} <= {*greedy}
    )
    return [*greedy, *policies]


def _allowed(request: Request) -> Sequence[str]:
    """Return the protocols from which the request's policy may choose, or its own."""
    if request.protocol not in (None, AUTO):
        assert request.protocol is not None
        return [request.protocol]
    policy = POLICIES.get(request.auto.policy)
    if policy is not None and policy.protocols:
        return policy.protocols
    return tuple(PROTOCOL_REGISTRY) if request.auto.among is None else request.auto.among
