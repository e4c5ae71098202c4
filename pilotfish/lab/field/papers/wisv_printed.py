"""The numbers that wisv prints: Table I, and the accuracies of §VI-B (figure 3)."""

from itertools import product
from typing import NamedTuple

from pilotfish.lab.field.papers.sheet import Row

# Columns: window, method; latency (s), AAL, rounds, tokens/s at 500 Mbit/s; the same at 20 Mbit/s
TABLE1 = """
10 greedy   7.616   6.607  31.912  27.683   7.617   6.607  31.912  27.681
10 reject   8.962   6.595  32.036  23.577  40.542   6.586  32.040   5.205
10 wisv     6.634   7.478  27.736  31.267   6.816   7.805  27.144  31.083
16 greedy   8.842   8.336  25.128  23.689   8.843   8.336  25.128  23.687
16 reject  10.543   8.305  25.244  19.886  50.096   8.335  25.112   4.179
16 wisv     7.317   9.991  20.732  28.309   7.553  10.630  19.936  28.057
24 greedy  11.074   9.513  22.020  18.916  11.075   9.513  22.020  18.915
24 reject  13.313   9.486  22.132  15.770  65.493   9.505  22.072   3.203
24 wisv     8.604  12.142  17.044  24.052   8.832  13.230  15.976  23.930
32 greedy  13.525  10.128  20.680  15.484  13.527  10.128  20.680  15.483
32 reject  16.376  10.060  20.848  12.806  81.731  10.104  20.744   2.564
32 wisv    10.021  13.522  15.260  20.592  10.140  14.979  13.892  20.522
64 greedy  24.272  10.789  19.272   8.566  24.274  10.789  19.272   8.566
64 reject  29.570  10.708  19.424   7.033 151.663  10.763  19.368   1.374
64 wisv    16.653  15.489  13.152  12.233  17.394  17.343  12.092  12.057
"""
METHODS = ("greedy", "reject", "wisv")
RATES_MBPS = (500, 20)
WINDOWS = (10, 16, 24, 32, 64)
TABLE1_RTT_MS = 50
SETTINGS = ((20, 5), (20, 50), (500, 5), (500, 50))  # links of figure 4: rate (Mbit/s), RTT (ms)
# per cent of right answers by figure 3's threshold, at 500 and at 20 Mbit/s (§VI-B)
ACCURACIES = {0: (80.4, 80.4), 12: (82.8, 79.6)}


class TableCell(NamedTuple):
    """The numbers that Table I prints for one method, window and rate."""

    latency_s: float
    aal: float
    rounds: float
    throughput: float


def _cells() -> dict[tuple[int, str, int], TableCell]:
    cells = {}
    for line in TABLE1.strip().splitlines():
        window, method, *numbers = line.split()
        for at, mbps in enumerate(RATES_MBPS):
            values = map(float, numbers[4 * at : 4 * at + 4])
            cells[int(window), method, mbps] = TableCell(*values)
    return cells


CELLS = _cells()


def printed_table1() -> list[Row]:
    """Return Table I, with the ratios to greedy that follow from it."""
    rows: list[Row] = []
    for (window, method, mbps), cell in CELLS.items():
        greedy = CELLS[window, "greedy", mbps]
        rows.append(
            {
                "window": window,
                "method": method,
                "rate_mbps": mbps,
                "aal_printed": cell.aal,
                "aal_over_greedy_printed": cell.aal / greedy.aal,
                "rounds_printed": cell.rounds,
                "latency_printed_s": cell.latency_s,
                "latency_over_greedy_printed": cell.latency_s / greedy.latency_s,
                "throughput_printed_tps": cell.throughput,
            }
        )
    return rows


def printed_figure4() -> list[Row]:
    """Return Table I's latencies, which figure 4 shows for an RTT of 50 ms."""
    rows: list[Row] = []
    for mbps, window in product(RATES_MBPS, WINDOWS):
        greedy, reject, full = (CELLS[window, method, mbps].latency_s for method in METHODS)
        rows.append(
            {
                "rate_mbps": mbps,
                "rtt_ms": TABLE1_RTT_MS,
                "window": window,
                "reject_over_greedy_printed": reject / greedy,
                "fh_over_greedy_printed": full / greedy,
            }
        )
    return rows
