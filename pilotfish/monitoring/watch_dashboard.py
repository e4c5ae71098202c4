"""The dashboard of watches (`field watch`): is the edge there, how far away, how fast."""

from typing import Final

from pilotfish.monitoring.dashboard import (
    Dashboard,
    Panel,
    Query,
    Section,
    heatmap,
    process_section,
    rate,
    series,
)

_W: Final = "pilotfish_watch_"
_RATE_TIME: Final = "[6h]"

_NOW = Section(
    "Now",
    (
        Panel(
            "Watches",
            "Number of watches that answer Prometheus.",
            "none",
            (Query(f"count({series(f'{_W}build_info')})", "watches"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Away now",
            "Watches whose edge cannot be used now.",
            "none",
            (Query(f"sum({series(f'{_W}away')})", "away"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Since the last success",
            "Time since the newest probe or answer. Longer than the interval of the watch: the "
            "edge is away, or the watch hangs.",
            "s",
            (Query(series(f"{_W}last_success_age_seconds")),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Since the last row",
            "Age of the newest row in the run file: a probe, an answer, begin or end of an outage, "
            "or the start of the watch.",
            "s",
            (Query(series(f"{_W}last_row_age_seconds")),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Run file",
            "Size of the run file. `--most-bytes` and `--keep` bound it.",
            "bytes",
            (Query(series(f"{_W}file_bytes")),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Disk fails",
            "Watches that keep rows in memory because the disk does not take them.",
            "none",
            (Query(f"sum({series(f'{_W}disk_failing')})", "fail"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "What runs",
            "Version, device and edge of each watch.",
            "none",
            (Query(series(f"{_W}build_info")),),
            kind="table",
            width=24,
        ),
    ),
)

_LINK = Section(
    "Link",
    (
        Panel(
            "Round trip",
            "Median and 90th percentile of the round-trip times of the last probe.",
            "s",
            (
                Query(series(f"{_W}probe_rtt_median_seconds"), "median, {{instance}}"),
                Query(series(f"{_W}probe_rtt_p90_seconds"), "p90, {{instance}}"),
            ),
            width=12,
        ),
        Panel(
            "Round trip of the last six hours",
            "Percentiles of all pings of the six hours before.",
            "s",
            tuple(
                Query(
                    f"histogram_quantile({share}, sum by (le, instance) "
                    f"(increase({series(f'{_W}rtt_seconds_bucket')}{_RATE_TIME})))",
                    f"p{100 * share:g}, {{{{instance}}}}",
                )
                for share in (0.5, 0.9, 0.99)
            ),
            width=12,
        ),
        Panel(
            "Round trip, all pings",
            "How many pings took how long.",
            "s",
            heatmap(f"{_W}rtt_seconds"),
            kind="heatmap",
        ),
        Panel(
            "Lost pings",
            "Share of the last probe's pings without a reply.",
            "percentunit",
            (Query(series(f"{_W}probe_lost_ratio")),),
        ),
        Panel(
            "Goodput",
            "Payload rate of the last probe, from the watch to the edge (up) and back.",
            "Bps",
            (
                Query(series(f"{_W}goodput_up_bytes_per_second"), "up, {{instance}}"),
                Query(series(f"{_W}goodput_down_bytes_per_second"), "down, {{instance}}"),
            ),
            needs="a probe could measure it",
        ),
        Panel(
            "Goodput is a bound",
            "1 where the value of the panel Goodput is only a lower bound: the link carries at "
            "least this much, and the transfer could not show whether it carries more. 0 where it "
            "was measured.",
            "none",
            (
                Query(series(f"{_W}goodput_up_bound"), "up, {{instance}}"),
                Query(series(f"{_W}goodput_down_bound"), "down, {{instance}}"),
            ),
            needs="a probe could measure it",
        ),
        Panel(
            "Radio",
            "Signal strength of the radio in the last probe.",
            "dBm",
            (Query(series(f"{_W}signal_dbm")),),
            needs="the machine has a radio",
        ),
        Panel(
            "Bytes of probes",
            "Bytes per second that the probes cost, by direction.",
            "Bps",
            (Query(rate(f"{_W}probe_bytes_total", "instance, direction"), "{{direction}}"),),
        ),
    ),
)

_OUTAGES = Section(
    "Outages",
    (
        Panel(
            "Edge away",
            "1 while the edge cannot be used.",
            "none",
            (Query(series(f"{_W}away")),),
        ),
        Panel(
            "Outages in 24 hours",
            "How often the edge went away in the 24 hours before.",
            "none",
            (Query(f"sum by (instance) (increase({series(f'{_W}outages_total')}[24h]))"),),
        ),
        Panel(
            "Time away in 24 hours",
            "Time in which the edge could not be used in the 24 hours before.",
            "s",
            (Query(f"sum by (instance) (increase({series(f'{_W}away_seconds_total')}[24h]))"),),
        ),
    ),
)

_ANSWERS = Section(
    "Answers",
    (
        Panel(
            "Time per token",
            "Seconds per token of the last answer after its first round, by protocol: what a "
            "report calls time per token. The first round reads the prompt.",
            "s",
            (Query(series(f"{_W}token_seconds"), "{{protocol}}, {{instance}}"),),
        ),
        Panel(
            "Time to the first token",
            "Seconds to the first token of the last answer, by protocol.",
            "s",
            (Query(series(f"{_W}first_token_seconds"), "{{protocol}}, {{instance}}"),),
        ),
        Panel(
            "Choices of auto",
            "Protocols that `auto` chose in the six hours before.",
            "none",
            (
                Query(
                    f"sum by (protocol) (increase({series(f'{_W}choices_total')}{_RATE_TIME}))",
                    "{{protocol}}",
                ),
            ),
            stacked=True,
            needs="auto is among the watch's protocols",
        ),
        Panel(
            "Answers",
            "Finished answers in the six hours before, by protocol.",
            "none",
            (
                Query(
                    f"sum by (protocol) (increase({series(f'{_W}answers_total')}{_RATE_TIME}))",
                    "{{protocol}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Failed answers",
            "Answers that failed although the edge could be used, in the six hours before.",
            "none",
            (
                Query(
                    "sum by (protocol) "
                    f"(increase({series(f'{_W}failed_answers_total')}{_RATE_TIME}))",
                    "{{protocol}}",
                ),
            ),
        ),
        Panel(
            "Power",
            "Mean power during the last probe.",
            "watt",
            (Query(series(f"{_W}power_watts"), "power, {{instance}}"),),
            needs="the machine has a power sensor",
            width=4,
        ),
        Panel(
            "Energy of an answer",
            "Energy of the machine for each answer in the six hours before, by protocol.",
            "joule",
            (
                Query(
                    "sum by (protocol) "
                    f"(increase({series(f'{_W}answer_energy_joules_total')}{_RATE_TIME})) / "
                    f"sum by (protocol) (increase({series(f'{_W}answers_total')}{_RATE_TIME}))",
                    "{{protocol}}",
                ),
            ),
            needs="the machine has a power sensor",
            width=4,
        ),
    ),
)

_FILE = Section(
    "Run file",
    (
        Panel(
            "Rounds and rows",
            "Rounds that ended and rows that were written in the last hour.",
            "none",
            (
                Query(f"increase({series(f'{_W}rounds_total')}[1h])", "rounds, {{instance}}"),
                Query(f"increase({series(f'{_W}rows_total')}[1h])", "rows, {{instance}}"),
            ),
        ),
        Panel(
            "Disk errors",
            "Writes that failed, and rows that were lost, in the last hour.",
            "none",
            (
                Query(f"increase({series(f'{_W}disk_errors_total')}[1h])", "errors, {{instance}}"),
                Query(f"increase({series(f'{_W}dropped_rows_total')}[1h])", "lost, {{instance}}"),
            ),
        ),
        Panel(
            "Settings of the wall clock",
            "How often the wall clock was set in the last hour, by a person or by NTP. The run's "
            "clock does not follow.",
            "none",
            (Query(f"increase({series(f'{_W}clock_steps_total')}[1h])"),),
        ),
    ),
)

WATCH: Final = Dashboard(
    "watch",
    "Pilotfish: watch",
    "Link, outages and answers of the watches (`pilotfish field watch`) that Prometheus scrapes.",
    f"{_W}build_info",
    (_NOW, _LINK, _OUTAGES, _ANSWERS, _FILE, process_section(f"{_W}build_info")),
)
