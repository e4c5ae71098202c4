"""The dashboard of device services: the link, speed of answers, acceptance, requests."""

from typing import Final

from pilotfish.monitoring.dashboard import (
    Dashboard,
    Panel,
    Query,
    Section,
    heatmap,
    process_section,
    quantile,
    quantiles,
    rate,
    ratio,
    series,
)
from pilotfish.monitoring.device_link import LINK

_D: Final = "pilotfish_"
_S: Final = "pilotfish_spec_decode_"
_BY_PROTOCOL: Final = "{{protocol}}"

_NOW = Section(
    "Now",
    (
        Panel(
            "Device services",
            "Number of device services that answer Prometheus.",
            "none",
            (Query(f"count({series(f'{_D}build_info')})", "services"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "With an edge",
            "Number of device services that are connected to their edge.",
            "none",
            (Query(f"sum({series(f'{_D}link_up')})", "connected"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Answers that run",
            "Answers that are being generated now.",
            "none",
            (Query(f"sum({series(f'{_D}num_requests_running')})", "running"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Answers that wait",
            "Answers that wait for a lane (`--lanes`).",
            "none",
            (Query(f"sum({series(f'{_D}num_requests_waiting')})", "waiting"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Drafters intact",
            "Device services whose drafter was verified against the digests of its export.",
            "none",
            (Query(f"sum({series(f'{_D}weights_verified')})", "verified"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Damaged drafters",
            "Device services with a file of the drafter that differs from its digest. Install the "
            "bundle again.",
            "none",
            (Query(f"sum({series(f'{_D}weights_damaged')})", "damaged"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "What runs",
            "Version, drafter and how it is executed. The provider is `none` for a drafter without "
            "a model. A machine with a GPU should not have the provider `cpu`.",
            "none",
            (Query(series(f"{_D}build_info")),),
            kind="table",
            width=12,
        ),
        Panel(
            "State of the link",
            "The present state of the link to the edge. docs/operations.md, section The state of "
            "the link, has the remedy of each state.",
            "none",
            (Query(f"{series(f'{_D}link_state')} == 1"),),
            kind="table",
            width=12,
        ),
    ),
)

_ANSWERS = Section(
    "Answers",
    (
        Panel(
            "Time to the first token",
            "Seconds from a request to the first token of its answer.",
            "s",
            quantiles(f"{_D}time_to_first_token_seconds"),
        ),
        Panel(
            "Time per token",
            "Seconds per token after the first, one value for each answer.",
            "s",
            quantiles(f"{_D}time_per_output_token_seconds"),
        ),
        Panel(
            "Time per token, all answers",
            "How many answers needed how long per token.",
            "s",
            heatmap(f"{_D}time_per_output_token_seconds"),
            kind="heatmap",
        ),
        Panel(
            "Tokens by origin",
            "Tokens of answers per second. `drafted` and `forced` came from this device, `local` "
            "tokens were not verified by a target.",
            "none",
            (Query(rate(f"{_D}generation_tokens_total", "origin"), "{{origin}}"),),
            stacked=True,
        ),
        Panel(
            "Finished answers",
            "Finished answers per second, by protocol. Under `auto` the device chose the protocol.",
            "none",
            (Query(rate(f"{_D}generations_total", "protocol"), _BY_PROTOCOL),),
            stacked=True,
        ),
        Panel(
            "Protocol of the newest answer",
            "1 for the protocol that the newest answer used.",
            "none",
            (
                Query(
                    f"max by (instance, protocol) ({series(f'{_D}protocol_in_use')}) == 1",
                    "{{protocol}}, {{instance}}",
                ),
            ),
        ),
    ),
)

_SPECULATION = Section(
    "Speculation",
    (
        Panel(
            "Tokens per round",
            "Tokens of a round: its accepted drafts, and one token of the target.",
            "none",
            (
                Query(
                    "1 + "
                    + ratio(f"{_S}num_accepted_tokens_total", f"{_S}num_drafts_total", "protocol"),
                    _BY_PROTOCOL,
                ),
            ),
        ),
        Panel(
            "Acceptance",
            "Share of the drafted tokens that the target accepted. Under `ahead` the drafts are "
            "hints, which have a panel of their own.",
            "percentunit",
            (
                Query(
                    ratio(
                        f"{_S}num_accepted_tokens_total",
                        f"{_S}num_draft_tokens_total",
                        "protocol",
                        'protocol!="ahead"',
                    ),
                    _BY_PROTOCOL,
                ),
            ),
        ),
        Panel(
            "Accepted by position",
            "Accepted tokens per second by their position in the window. Where it falls to zero, a "
            "longer window gains nothing.",
            "none",
            (Query(rate(f"{_S}num_accepted_tokens_per_pos_total", "position"), "{{position}}"),),
        ),
        Panel(
            "Stages of a round",
            "Median time of each stage of a round. The largest one limits the speed.",
            "s",
            (Query(quantile(0.5, f"{_D}stage_seconds", "stage"), "{{stage}}"),),
            stacked=True,
        ),
        Panel(
            "Accepted hints",
            "Under `ahead`: share of each source's hints that the target accepted.",
            "percentunit",
            (
                Query(
                    ratio(
                        f"{_D}hint_accepted_tokens_total",
                        f"{_D}hint_drafted_tokens_total",
                        "source",
                    ),
                    "{{source}}",
                ),
            ),
        ),
        Panel(
            "Forgiven tokens",
            "Share of the accepted tokens that a decision head forgave.",
            "percentunit",
            (
                Query(
                    ratio(
                        f"{_S}num_forgiven_tokens_total",
                        f"{_S}num_accepted_tokens_total",
                        "protocol",
                    ),
                    _BY_PROTOCOL,
                ),
            ),
            needs="requests use protocol wisv with a decision head",
        ),
        Panel(
            "Deviation",
            "Under `adaptive`: total variation from the target's distribution per round.",
            "none",
            (
                Query(
                    ratio(f"{_S}deviation_total", f"{_S}num_drafts_total", "protocol"),
                    _BY_PROTOCOL,
                ),
            ),
            needs="requests use protocol adaptive",
        ),
    ),
)

_REQUESTS = Section(
    "Requests",
    (
        Panel(
            "HTTP requests",
            "Answered HTTP requests per second, by status.",
            "none",
            (Query(rate(f"{_D}http_requests_total", "status"), "{{status}}"),),
            stacked=True,
        ),
        Panel(
            "Time of requests",
            "90th percentile of the seconds from an HTTP request to the end of its answer.",
            "s",
            (
                Query(
                    quantile(0.9, f"{_D}http_request_duration_seconds", "route"),
                    "{{route}}",
                ),
            ),
        ),
        Panel(
            "Refused requests",
            "Refused requests per second. `key`: a wrong API key. `busy`: the queue is full.",
            "none",
            (Query(rate(f"{_D}refusals_total", "reason"), "{{reason}}"),),
            needs="the service has refused a request",
        ),
        Panel(
            "Queue",
            "Answers that wait for a lane, and answers that run.",
            "none",
            (
                Query(series(f"{_D}num_requests_waiting"), "waiting, {{instance}}"),
                Query(series(f"{_D}num_requests_running"), "running, {{instance}}"),
            ),
        ),
        Panel(
            "Connections of clients",
            "Open connections, and connections per second that were closed for want of room.",
            "none",
            (
                Query(series(f"{_D}http_connections"), "open, {{instance}}"),
                Query(rate(f"{_D}http_connections_turned_away_total"), "turned away, {{instance}}"),
            ),
        ),
        Panel(
            "Power",
            "Power of the board's rails whose energy is counted.",
            "watt",
            (Query(series(f"{_D}power_watts")),),
            needs="the board has a power sensor",
        ),
        Panel(
            "Energy per token",
            "Energy of the board for each token of an answer, including idle time.",
            "joule",
            (Query(ratio(f"{_D}energy_joules_total", f"{_D}generation_tokens_total")),),
            needs="the board has a power sensor",
        ),
    ),
)

DEVICE: Final = Dashboard(
    "device",
    "Pilotfish: device",
    "Answers, speculation, link and requests of the device services that Prometheus scrapes.",
    f"{_D}build_info",
    (_NOW, _ANSWERS, _SPECULATION, LINK, _REQUESTS, process_section(f"{_D}build_info")),
)
