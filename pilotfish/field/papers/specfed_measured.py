"""specfed's figures 2 and 3 on our own models, as `benchmarks/federated.py` measured them.

Unlike all else here these are measurements, of SmolLM2-135M-Instruct (V = 49,152; the default
weights, origin 06bcc47f710b3cb5). Two workers: fp32 and int8, weights ½ and ½. Three: these and the
same weights cut to the first 27 of their 30 layers, in int8; weights 0.4, 0.4 and 0.2. The int4
export drafts. Each federation wrote its own answers, of at most 99 tokens, to the benchmark's eight
prompts. Values travelled in fp32; bytes are those of a worker's frame for γ + 1 = 9 positions. ONNX
Runtime 1.31 on a CPU, whose int8 kernels others will not repeat to the digit.
"""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path

from pilotfish.field.papers.sheet import Sheet, Value

# workers, temperature, K, ρ of each worker; bias by (5), (6), bound (17); change of acceptance by
# (5), (6), bound (19); bytes with values in fp16, in levels
TABLE = """
2 0.5    32 0.9988 0.9988         0.00238 0.00235 0.00239  0.00034 0.00048 0.00119    1000    595
2 0.5    64 0.9996 0.9996         0.00073 0.00071 0.00073  0.00011 0.00015 0.00036    1897   1074
2 0.5   128 0.9999 0.9999         0.00021 0.00020 0.00021  0.00003 0.00004 0.00010    3644   1969
2 0.5   320 1.0000 1.0000         0.00003 0.00003 0.00003  0.00000 0.00001 0.00002    8668   4339
2 0.5   640 1.0000 1.0000         0.00001 0.00001 0.00001  0.00000 0.00000 0.00000   16705   7741
2 0.5  1280 1.0000 1.0000         0.00000 0.00000 0.00000  0.00000 0.00000 0.00000   32090  13472
2 0.5  3200 1.0000 1.0000         0.00000 0.00000 0.00000  0.00000 0.00000 0.00000   76758  27463
2 0.5  8192 1.0000 1.0000         0.00000 0.00000 0.00000  0.00000 0.00000 0.00000  183085  50840
2 0.5 16384 1.0000 1.0000         0.00000 0.00000 0.00000  0.00000 0.00000 0.00000  346724  76458
2 0.5 49152 1.0000 1.0000         0.00000 0.00000 0.00000  0.00000 0.00000 0.00000  884776 116847
2 1.0    32 0.8361 0.8351         0.32537 0.29127 0.32887  0.07063 0.08093 0.16443     984    541
2 1.0    64 0.8764 0.8757         0.24565 0.21517 0.24785  0.05158 0.05974 0.12393    1866    981
2 1.0   128 0.9099 0.9094         0.17942 0.15304 0.18072  0.03660 0.04232 0.09036    3590   1824
2 1.0   320 0.9447 0.9444         0.11039 0.08992 0.11096  0.02206 0.02465 0.05548    8580   4170
2 1.0   640 0.9643 0.9641         0.07141 0.05553 0.07167  0.01414 0.01500 0.03583   16604   7808
2 1.0  1280 0.9786 0.9785         0.04275 0.03131 0.04286  0.00845 0.00827 0.02143   32004  14481
2 1.0  3200 0.9908 0.9908         0.01837 0.01206 0.01839  0.00366 0.00303 0.00920   76442  32977
2 1.0  8192 0.9972 0.9972         0.00555 0.00310 0.00556  0.00113 0.00070 0.00278  182762  72716
2 1.0 16384 0.9993 0.9993         0.00147 0.00069 0.00147  0.00030 0.00014 0.00073  346765 129426
2 1.0 49152 1.0000 1.0000         0.00000 0.00000 0.00000  0.00000 0.00000 0.00000  884776 312371
2 1.5    32 0.2073 0.2075         1.57889 0.98803 1.58523  0.55842 0.28279 0.79262     943    463
2 1.5    64 0.2528 0.2531         1.48713 0.91284 1.49409  0.52128 0.26029 0.74705    1791    837
2 1.5   128 0.3063 0.3065         1.37959 0.82669 1.38721  0.47738 0.23443 0.69360    3453   1552
2 1.5   320 0.3915 0.3917         1.20805 0.69405 1.21676  0.40813 0.19459 0.60838    8324   3587
2 1.5   640 0.4682 0.4684         1.05401 0.58023 1.06338  0.34628 0.16035 0.53169   16183   6732
2 1.5  1280 0.5559 0.5560         0.87879 0.45741 0.88809  0.27724 0.12360 0.44405   31470  12640
2 1.5  3200 0.6864 0.6863         0.62000 0.29097 0.62725  0.18051 0.07486 0.31363   75580  28886
2 1.5  8192 0.8274 0.8273         0.34250 0.13693 0.34530  0.08870 0.03221 0.17265  181423  63653
2 1.5 16384 0.9212 0.9212         0.15679 0.05290 0.15752  0.03726 0.01115 0.07876  345477 114618
2 1.5 49152 1.0000 1.0000         0.00000 0.00000 0.00000  0.00000 0.00000 0.00000  884776 398454
3 0.5    32 0.9987 0.9986 0.9994  0.00242 0.00239 0.00243  0.00033 0.00046 0.00122     976    570
3 0.5    64 0.9995 0.9995 0.9998  0.00080 0.00079 0.00081  0.00012 0.00016 0.00040    1851   1030
3 0.5   128 0.9999 0.9999 0.9999  0.00025 0.00025 0.00025  0.00004 0.00005 0.00013    3555   1887
3 0.5   320 1.0000 1.0000 1.0000  0.00005 0.00005 0.00005  0.00001 0.00001 0.00002    8492   4196
3 0.5   640 1.0000 1.0000 1.0000  0.00001 0.00001 0.00001  0.00000 0.00000 0.00001   16430   7554
3 0.5  1280 1.0000 1.0000 1.0000  0.00000 0.00000 0.00000  0.00000 0.00000 0.00000   31636  13181
3 0.5  3200 1.0000 1.0000 1.0000  0.00000 0.00000 0.00000  0.00000 0.00000 0.00000   75750  26910
3 0.5  8192 1.0000 1.0000 1.0000  0.00000 0.00000 0.00000  0.00000 0.00000 0.00000  181809  50396
3 0.5 16384 1.0000 1.0000 1.0000  0.00000 0.00000 0.00000  0.00000 0.00000 0.00000  345495  76127
3 0.5 49152 1.0000 1.0000 1.0000  0.00000 0.00000 0.00000  0.00000 0.00000 0.00000  884776 117760
3 1.0    32 0.8588 0.8574 0.9693  0.23566 0.21443 0.23935  0.05172 0.06462 0.11968     965    530
3 1.0    64 0.8973 0.8961 0.9811  0.17081 0.15174 0.17279  0.03624 0.04588 0.08639    1831    962
3 1.0   128 0.9278 0.9268 0.9881  0.12003 0.10373 0.12106  0.02474 0.03124 0.06053    3515   1780
3 1.0   320 0.9578 0.9571 0.9936  0.07023 0.05800 0.07066  0.01413 0.01723 0.03533    8406   4073
3 1.0   640 0.9738 0.9733 0.9961  0.04368 0.03449 0.04389  0.00872 0.01005 0.02194   16316   7640
3 1.0  1280 0.9850 0.9847 0.9978  0.02505 0.01866 0.02514  0.00501 0.00527 0.01257   31476  14095
3 1.0  3200 0.9940 0.9938 0.9992  0.01005 0.00674 0.01008  0.00206 0.00179 0.00504   75386  31892
3 1.0  8192 0.9983 0.9983 0.9998  0.00278 0.00160 0.00279  0.00059 0.00038 0.00139  181321  69883
3 1.0 16384 0.9996 0.9996 1.0000  0.00067 0.00033 0.00067  0.00015 0.00007 0.00034  345081 122472
3 1.0 49152 1.0000 1.0000 1.0000  0.00000 0.00000 0.00000  0.00000 0.00000 0.00000  884776 280519
3 1.5    32 0.2070 0.2061 0.8878  1.30263 0.81072 1.31445  0.49579 0.24098 0.65723     937    471
3 1.5    64 0.2518 0.2509 0.9207  1.21916 0.74103 1.22960  0.45997 0.22102 0.61480    1775    849
3 1.5   128 0.3038 0.3030 0.9427  1.12804 0.66719 1.13748  0.41899 0.19888 0.56874    3401   1557
3 1.5   320 0.3867 0.3859 0.9623  0.98812 0.55871 0.99704  0.35524 0.16541 0.49852    8172   3573
3 1.5   640 0.4612 0.4604 0.9732  0.86472 0.46796 0.87345  0.29886 0.13672 0.43673   15952   6761
3 1.5  1280 0.5468 0.5460 0.9819  0.72471 0.37084 0.73302  0.23668 0.10605 0.36651   30987  12645
3 1.5  3200 0.6761 0.6754 0.9907  0.51617 0.23854 0.52254  0.15033 0.06492 0.26127   74516  28939
3 1.5  8192 0.8190 0.8185 0.9966  0.28875 0.11420 0.29130  0.07138 0.02841 0.14565  180255  64999
3 1.5 16384 0.9164 0.9162 0.9991  0.13359 0.04492 0.13428  0.02921 0.01000 0.06714  344100 117205
3 1.5 49152 1.0000 1.0000 1.0000  0.00000 0.00000 0.00000  0.00000 0.00000 0.00000  884776 367754
"""
POSITIONS = {2: {0.5: 735, 1.0: 701, 1.5: 792}, 3: {0.5: 792, 1.0: 745, 1.5: 792}}
SHOWN = (64, 320, 3200)
WORKERS = {2: "fp32, int8", 3: "fp32, int8, 27 layers"}
FIGURES = {
    "specfed_figure2": ("bias", "_17", "Bias of the average", "‖p̃ − p‖₁ (probability mass)"),
    "specfed_figure3": ("vary", "_19", "Change of acceptance", "|β̃ − β| (probability)"),
}
_LEAST, _MOST = 1e-5, 60.0  # where the figures end; the legend stands above 2


def _rows() -> list[dict[str, Value]]:
    rows: list[dict[str, Value]] = []
    for line in TABLE.strip().splitlines():
        workers, temperature, kept, *numbers = line.split()
        count = int(workers)
        keys = (
            *(f"rho_{worker}" for worker in range(1, count + 1)),
            *("bias_5", "bias_6", "bias_17", "vary_5", "vary_6", "vary_19"),
        )
        values: dict[str, Value] = dict(zip(keys, map(float, numbers), strict=False))
        rows.append(
            {
                "who": WORKERS[count],
                "workers": count,
                "T": float(temperature),
                "K": int(kept),
                "positions": POSITIONS[count][float(temperature)],
                "rho_3": None,
                **values,
                "fp16": int(numbers[-2]),
                "levels": int(numbers[-1]),
            }
        )
    return rows


ROWS = _rows()


def measured() -> Sheet:
    """The measurements; a terminal is shown a few K."""
    columns: dict[str, tuple[str, int | None]] = {
        "workers": ("M", 0),
        "T": ("T", 1),
        "K": ("K", 0),
        "rho_1": ("ρ₁", 3),
        "bias_5": ("bias (5)", 3),
        "bias_6": ("(6)", 3),
        "bias_17": ("≤ (17)", 3),
        "vary_5": ("Δβ (5)", 3),
        "vary_6": ("(6)", 3),
        "vary_19": ("≤ (19)", 3),
    }
    note = "; ".join(f"M = {count}: {who}" for count, who in WORKERS.items())
    note += ". Means over all positions; none is beyond its bound. JSON has bytes and more K."
    title = "Figures 2 and 3, measured on SmolLM2-135M at temperature T"
    return Sheet("measured", title, columns, ROWS, note, lambda row: row["K"] in SHOWN)


def draw(rows: Sequence[Mapping[str, Value]], folder: Path) -> list[Path]:
    """Figures 2 and 3 of one federation, from the rows of the benchmark or of `ROWS`."""
    from pilotfish.field.drawing import MARKERS, PALETTE, plot

    paths = []
    temperatures = sorted({number(row, "T") for row in rows})
    for name, (what, bound, title, label) in FIGURES.items():
        path = folder / f"{name}_{rows[0]['workers']}_workers.png"
        styles = {f"{what}{bound}": ":", f"{what}_5": "--", f"{what}_6": "-"}
        with plot(path, f"{title}, measured\n{rows[0]['who']}", "kept tokens K", label) as axes:
            for temperature, colour, marker in zip(temperatures, PALETTE, MARKERS, strict=False):
                chosen = [row for row in rows if row["T"] == temperature]
                kept = [number(row, "K") for row in chosen]
                n = chosen[0]["positions"]
                axes.plot(
                    [], [], color=colour, marker=marker, label=f"T = {temperature:g}, n = {n}"
                )
                for key, style in styles.items():
                    # a logarithmic axis has no 0
                    values = [value if (value := number(row, key)) > 0.0 else nan for row in chosen]
                    mark = marker if style == "-" else ""
                    axes.plot(kept, values, linestyle=style, marker=mark, color=colour)
            axes.set(xscale="log", yscale="log")
            axes.set_xticks([32, 320, 3200, 32000], ["32", "320", "3200", "32000"])
            axes.set_ylim(_LEAST, _MOST)
            names = (f"bound ({bound[1:]})", "renormalised (5)", "spread (6)")
            for style, each in zip(styles.values(), names, strict=True):
                axes.plot([], [], color="#555555", linestyle=style, label=each)
            axes.legend(loc="upper left", ncols=2)
        paths.append(path)
    return paths


def number(row: Mapping[str, Value], key: str) -> float:
    """A cell that holds a number."""
    return float(str(row[key]))
