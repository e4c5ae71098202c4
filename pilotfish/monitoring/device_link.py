"""Section of the device's dashboard about the link to its edge."""

from typing import Final

from pilotfish.monitoring.dashboard import Panel, Query, Section, rate, series

_D: Final = "pilotfish_"

LINK: Final = Section(
    "Link",
    (
        Panel(
            "Round trip",
            "Round-trip time of a small message, and its mean change from one message to the next.",
            "s",
            (
                Query(series(f"{_D}link_rtt_seconds"), "RTT, {{instance}}"),
                Query(series(f"{_D}link_jitter_seconds"), "jitter, {{instance}}"),
            ),
        ),
        Panel(
            "Edge connected",
            "1 while the edge is connected.",
            "none",
            (Query(series(f"{_D}link_up")),),
        ),
        Panel(
            "Losses",
            "How often the edge was lost in the last hour.",
            "none",
            (Query(f"sum by (instance) (increase({series(f'{_D}link_losses_total')}[1h]))"),),
        ),
        Panel(
            "Recovery",
            "Seconds from a loss of the edge during an answer until tokens were verified again, "
            "over the last hour.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({share}, sum by (le) "
                    f"(increase({series(f'{_D}recovery_seconds_bucket')}[1h])))",
                    name,
                )
                for share, name in ((0.5, "p50"), (0.9, "p90"))
            ),
            needs="the edge was lost during an answer",
        ),
        Panel(
            "Tokens without a target",
            "Tokens per second that the drafter generated alone while the edge was lost.",
            "none",
            (Query(rate(f"{_D}recovery_local_tokens_total")),),
        ),
        Panel(
            "Bytes",
            "Bytes of messages per second, without the overhead of the transport.",
            "Bps",
            (
                Query(
                    rate(f"{_D}link_bytes_total", "direction, purpose"),
                    "{{direction}}, {{purpose}}",
                ),
            ),
        ),
        Panel(
            "Goodput",
            "Payload rate between device and edge, where it was measured.",
            "Bps",
            (
                Query(series(f"{_D}link_goodput_up_bytes_per_second"), "up, {{instance}}"),
                Query(series(f"{_D}link_goodput_down_bytes_per_second"), "down, {{instance}}"),
            ),
            needs="messages were large enough to measure it",
        ),
        Panel(
            "Segments sent again",
            "Share of the TCP segments that were sent again.",
            "percentunit",
            (
                Query(series(f"{_D}link_retransmitted_ratio"), "up, {{instance}}"),
                Query(series(f"{_D}link_retransmitted_down_ratio"), "down, {{instance}}"),
            ),
        ),
        Panel(
            "Radio",
            "Signal strength of the radio.",
            "dBm",
            (Query(series(f"{_D}link_signal_dbm")),),
            needs="the machine has a radio",
        ),
    ),
)
