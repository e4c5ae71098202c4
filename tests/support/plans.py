"""Plans of the Python API's keywords, for tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pilotfish.device_runtime import alternatives as auto_plans
from pilotfish.device_runtime import plan as plans
from pilotfish.device_runtime.plan import Auto, Plan
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.request import Request


def plan(**options: Any) -> Plan:
    """Return the plan of these options."""
    return plans.plan(Request.from_options(options))


def alternatives(
    auto: Auto,
    options: Mapping[str, Any],
    *,
    offered: Collection[str],
    most: int = MAX_WINDOW,
    reachable: bool = True,
    vocab_size: int = 0,
) -> list[Plan]:
    """Return the plans that "auto" may choose from."""
    request = Request.from_options({**options, "protocol": auto})
    return auto_plans.alternatives(
        request, offered=offered, most=most, reachable=reachable, vocab_size=vocab_size
    )
