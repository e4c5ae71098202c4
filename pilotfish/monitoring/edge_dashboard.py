"""The dashboard of edges: load, acceptance, refusals, nodes."""

from typing import Final

from pilotfish.monitoring.dashboard import (
    Dashboard,
    Panel,
    Query,
    Section,
    heatmap,
    mean,
    process_section,
    quantile,
    rate,
    ratio,
    series,
)
from pilotfish.monitoring.edge_peers import NODES, REFUSALS, TRAFFIC

_E: Final = "pilotfish_edge_"
_BY_PROTOCOL: Final = "{{protocol}}"
_HEAD: Final = "requests use protocol wisv with a decision head"

_NOW = Section(
    "Now",
    (
        Panel(
            "Edges",
            "Number of edges that answer Prometheus.",
            "none",
            (Query(f"count({series(f'{_E}build_info')})", "edges"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Devices",
            "Connected devices, counted by their keys; without keys, connections.",
            "none",
            (Query(f"sum({series(f'{_E}devices')})", "devices"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Sessions",
            "Open sessions of all devices. The setting `sessions` limits them.",
            "none",
            (Query(f"sum({series(f'{_E}sessions')})", "sessions"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Settings in force",
            "No: the last reload could not apply all settings or keys; the journal says why.",
            "bool_yes_no",
            (Query(f"min({series(f'{_E}config_last_reload_successful')})", "settings"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Target intact",
            "Yes: the files of the target were verified against the digests of its export. No: "
            "they are not verified yet. An edge with a damaged file ends at once.",
            "bool_yes_no",
            (Query(f"min({series(f'{_E}weights_verified')})", "verified"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "What runs",
            "Software, target and how it is executed. The provider is `nodes` for a target on "
            "nodes. An edge with a GPU should not have the provider `cpu`.",
            "none",
            (Query(series(f"{_E}build_info")),),
            kind="table",
            width=24,
        ),
    ),
)

_LOAD = Section(
    "Load",
    (
        Panel(
            "Tokens",
            "Tokens per second that the edge gives its devices: accepted drafts, one token of the "
            "target for each window, and the tokens of protocols `stream` and `ahead`.",
            "none",
            (
                Query(rate(f"{_E}accepted_tokens_total"), "accepted drafts, {{instance}}"),
                Query(rate(f"{_E}windows_total"), "windows, {{instance}}"),
                Query(rate(f"{_E}streamed_tokens_total"), "stream and ahead, {{instance}}"),
            ),
            stacked=True,
        ),
        Panel(
            "Windows",
            "Verified windows per second, by protocol.",
            "none",
            (Query(rate(f"{_E}windows_total", "protocol"), _BY_PROTOCOL),),
            stacked=True,
        ),
        Panel(
            "Sessions and devices",
            "Open sessions, connected devices and connections.",
            "none",
            (
                Query(series(f"{_E}sessions"), "sessions, {{instance}}"),
                Query(series(f"{_E}devices"), "devices, {{instance}}"),
                Query(series(f"{_E}connections"), "connections, {{instance}}"),
            ),
        ),
        Panel(
            "Queue",
            "Time that a window, or a pass of an answer under `stream` or `ahead`, waits for the "
            "target. If it is above the time of a pass, the edge is full: add replicas.",
            "s",
            (
                Query(quantile(0.5, f"{_E}queue_seconds", "instance"), "p50, {{instance}}"),
                Query(quantile(0.9, f"{_E}queue_seconds", "instance"), "p90, {{instance}}"),
            ),
        ),
        Panel(
            "Queue over time",
            "How many windows waited for how long.",
            "s",
            heatmap(f"{_E}queue_seconds"),
            kind="heatmap",
        ),
        Panel(
            "Pass and verification",
            "Time of the target's pass and the verification of a window.",
            "s",
            (
                Query(quantile(0.5, f"{_E}verify_seconds", "instance"), "p50, {{instance}}"),
                Query(quantile(0.9, f"{_E}verify_seconds", "instance"), "p90, {{instance}}"),
            ),
        ),
        Panel(
            "Sessions in a pass",
            "Mean number of sessions that share a pass of the target. Near the number of open "
            "sessions, the edge has no room for more.",
            "none",
            (Query(mean(f"{_E}batch_sessions")),),
        ),
        Panel(
            "Tokens in a pass",
            "Mean number of tokens that a pass of the target reads.",
            "none",
            (Query(mean(f"{_E}pass_tokens")),),
        ),
        Panel(
            "Failed passes",
            "Passes per second that ended in an error. Any is a fault: see the journal.",
            "none",
            (Query(rate(f"{_E}failed_passes_total")),),
        ),
    ),
)

_ACCEPTANCE = Section(
    "Acceptance",
    (
        Panel(
            "Acceptance",
            "Share of the drafted tokens of windows that the target accepted, by protocol.",
            "percentunit",
            (
                Query(
                    ratio(f"{_E}accepted_tokens_total", f"{_E}drafted_tokens_total", "protocol"),
                    _BY_PROTOCOL,
                ),
            ),
        ),
        Panel(
            "Tokens per window",
            "Tokens that a device gets for each window: its accepted drafts, and one token of the "
            "target.",
            "none",
            (
                Query(
                    "1 + " + ratio(f"{_E}accepted_tokens_total", f"{_E}windows_total", "protocol"),
                    _BY_PROTOCOL,
                ),
            ),
        ),
        Panel(
            "Forgiven tokens",
            "Share of the accepted tokens that differ from the target's choice and that the "
            "decision head forgave.",
            "percentunit",
            (
                Query(
                    ratio(f"{_E}forgiven_tokens_total", f"{_E}accepted_tokens_total", "protocol"),
                    _BY_PROTOCOL,
                ),
            ),
            needs=_HEAD,
        ),
        Panel(
            "Deviation",
            "Under `adaptive`: total variation from the target's distribution per window.",
            "none",
            (
                Query(
                    ratio(f"{_E}deviation_total", f"{_E}windows_total", "protocol"),
                    _BY_PROTOCOL,
                ),
            ),
            needs="requests use protocol adaptive",
        ),
    ),
)

_HINTS = Section(
    "Hints and the edge's drafter (protocol ahead)",
    (
        Panel(
            "Accepted hints",
            "Share of each source's hints that the target accepted. Sources: `device`, `text`, "
            "`edge` (the drafter beside the target), `prediction`.",
            "percentunit",
            (
                Query(
                    ratio(
                        f"{_E}hint_accepted_tokens_total",
                        f"{_E}hint_drafted_tokens_total",
                        "source",
                    ),
                    "{{source}}",
                ),
            ),
        ),
        Panel(
            "Hints",
            "Hints of devices per second, by outcome. `stale` hints came too late: the link is "
            "slow for them.",
            "none",
            (Query(rate(f"{_E}hints_total", "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "The edge's drafter",
            "Share of the time in which the drafter beside the target computes.",
            "percentunit",
            (Query(rate(f"{_E}drafter_seconds_total")),),
        ),
    ),
)

EDGE: Final = Dashboard(
    "edge",
    "Pilotfish: edge",
    "Load, acceptance, refusals and nodes of the edges that Prometheus scrapes.",
    f"{_E}build_info",
    (
        _NOW,
        _LOAD,
        _ACCEPTANCE,
        _HINTS,
        REFUSALS,
        TRAFFIC,
        NODES,
        process_section(f"{_E}build_info"),
    ),
)
