"""Sections of the edge's dashboard about its peers: devices that connect, and nodes of a target."""

from typing import Final

from pilotfish.monitoring.dashboard import Panel, Query, Section, rate, ratio, series

_E: Final = "pilotfish_edge_"

REFUSALS: Final = Section(
    "Refusals, keys and connections",
    (
        Panel(
            "Refused requests",
            "Refused requests per second, by the code of the error. `too-many-sessions` and "
            "`busy`: the edge is full. `internal`: a fault, see the journal.",
            "none",
            (Query(rate(f"{_E}refusals_total", "code"), "{{code}}"),),
        ),
        Panel(
            "Refused handshakes",
            "Refused handshakes per second. `key`: the device's key is not on the allow-list. "
            "`edge-key`: the device has another edge's `edge.pub`. `broken`: not a device.",
            "none",
            (Query(rate(f"{_E}handshakes_refused_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Ended sessions",
            "Sessions per second that the edge ended by itself. `displaced`: another session "
            "needed the room.",
            "none",
            (Query(rate(f"{_E}sessions_ended_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Cut connections",
            "Connections per second that the edge ended, by reason.",
            "none",
            (Query(rate(f"{_E}connections_cut_total", "reason"), "{{reason}}"),),
            needs="the edge has cut a connection",
        ),
        Panel(
            "Key files",
            "Files on the allow-list without a valid key, and devices that last connected with the "
            "edge's former key (docs/keys.md).",
            "none",
            (
                Query(series(f"{_E}broken_key_files"), "broken files, {{instance}}"),
                Query(series(f"{_E}former_key_devices"), "former key, {{instance}}"),
            ),
        ),
        Panel(
            "No room for connections",
            "1 while the edge refuses connections because there are too many.",
            "none",
            (Query(series(f"{_E}connections_crowded")),),
        ),
    ),
)

TRAFFIC: Final = Section(
    "Traffic",
    (
        Panel(
            "Bytes",
            "Bytes of messages per second, without the overhead of the transport.",
            "Bps",
            (
                Query(rate(f"{_E}received_bytes_total"), "from devices, {{instance}}"),
                Query(rate(f"{_E}sent_bytes_total"), "to devices, {{instance}}"),
            ),
        ),
        Panel(
            "Lost replies",
            "Replies per second that could not be delivered: the device was gone or did not read.",
            "none",
            (Query(rate(f"{_E}dropped_replies_total")),),
        ),
        Panel(
            "Jobs of each device",
            "Windows, prompts and streamed tokens per second, by device.",
            "none",
            (Query(rate(f"{_E}device_jobs_total", "device"), "{{device}}"),),
            stacked=True,
            needs="the edge runs with --metrics-devices",
        ),
        Panel(
            "Sessions of each device",
            "Open sessions, by device.",
            "none",
            (Query(f"sum by (device) ({series(f'{_E}device_sessions')})", "{{device}}"),),
            stacked=True,
            needs="the edge runs with --metrics-devices",
        ),
        Panel(
            "Refused handshakes of known devices",
            "Refused handshakes per second of devices that were removed from the allow-list.",
            "none",
            (Query(rate(f"{_E}device_handshakes_refused_total", "device"), "{{device}}"),),
            needs="the edge runs with --metrics-devices",
        ),
    ),
)

NODES: Final = Section(
    "Nodes of a target (docs/scale.md)",
    (
        Panel(
            "Missing nodes",
            "0 for each node that takes no part in passes now. The status line of the edge says "
            "why.",
            "none",
            (Query(series(f"{_E}node_up"), "{{node}}"),),
            needs="the target is on nodes",
        ),
        Panel(
            "Events",
            "Events in the last hour: `gone` the connection ended, `late` the node's answer is "
            "late, `dropped` a pass continued without the node, `lied` its answer was invalid, "
            "`refused` the edge cannot use it.",
            "none",
            (
                Query(
                    f"sum by (node, event) (increase({series(f'{_E}node_events_total')}[1h]))",
                    "{{node}} {{event}}",
                ),
            ),
            needs="the target is on nodes",
        ),
        Panel(
            "Bytes of nodes",
            "Bytes per second to and from each node.",
            "Bps",
            (Query(rate(f"{_E}node_bytes_total", "node, direction"), "{{node}} {{direction}}"),),
            needs="the target is on nodes",
        ),
        Panel(
            "Computing time of nodes",
            "Share of the time in which a node computes, by its own measurement. The busiest stage "
            "should get fewer layers.",
            "percentunit",
            (Query(rate(f"{_E}node_compute_seconds_total", "node"), "{{node}}"),),
            needs="the target is on nodes",
        ),
        Panel(
            "Retained mass",
            "Mean ρ of each worker of a federation: the mass of the tokens that it sends.",
            "percentunit",
            (
                Query(
                    ratio(f"{_E}node_retained_mass_total", f"{_E}node_rows_total", "node"),
                    "{{node}}",
                ),
            ),
            needs="the target is a federation",
        ),
        Panel(
            "Bound on the change of acceptance",
            "Upper bound of the change of acceptance by a federation's truncation.",
            "percentunit",
            (Query(ratio(f"{_E}ensemble_omitted_mass_total", f"{_E}ensemble_rows_total")),),
            needs="the target is a federation",
        ),
    ),
)
