"""What a choice says of the link."""

from pilotfish.device_runtime.choice.policy import describe_link
from pilotfish.wire.link.state import LinkState, Reading


def test_unknown_values_are_told_with_what_they_count_as() -> None:
    known = Reading(value=20e6, age_s=1.0, samples=1)
    assert describe_link(LinkState(down=known)) == (
        "RTT unknown, counted as 50.0 ms, up unknown, counted as 1 Mbit/s, down 20 Mbit/s"
    )
    rtt = Reading(value=0.02, age_s=1.0, samples=1)
    assert describe_link(LinkState(rtt=rtt, up=known, down=known)) == (
        "RTT 20.0 ms, up 20 Mbit/s, down 20 Mbit/s"
    )
