"""Measure figures 2 and 3 of specfed: errors of an ensemble of which only the top K is known (§V).

In:  a bench: its target is the first worker, its drafter q; each further worker is one experiment.
Out: a row for each worker, temperature T and K. Figure 2 has the L1 error of the average (9) with
     its bound (17), figure 3 the change of acceptance (10) with its bound (19).

As in §V-A, the ensemble of both workers, with equal weights, first answers all prompts with whole
distributions, at each T. At each token of these answers the workers' distributions are cut to their
top K, rebuilt by (5) and by (6), and averaged by the functions of a serving federation. All values
are means over the positions of all answers; the intervals are bootstraps over prompts.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Engine, Work, open_engine
from pilotfish.lab.field.papers.figure import Bench, Figure, Identity
from pilotfish.lab.field.papers.sheet import Row, Value, interval, interval_columns
from pilotfish.lab.field.papers.specfed import upload_bits
from pilotfish.lab.field.papers.specfed_plots import draw_figure
from pilotfish.lab.field.resampling import resample_weights
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.speculation.ensemble import (
    Scheme,
    TopRows,
    acceptance_bound,
    acceptance_variation,
    aggregate,
    bias_bound,
    reconstruction_error,
    top_rows,
)
from pilotfish.speculation.randomness import Purpose, noise, sample
from pilotfish.speculation.theory import Values, beta
from pilotfish.wire.codecs.topk import encode_topk

TEMPERATURES = (0.5, 1.0, 1.5)
SIZES = (32, 64, 320, 1280, 3200)
WEIGHTS = (0.5, 0.5)
POSITIONS = 9  # rows of a worker's frame, γ + 1 for a window of 8
ANSWER = 2 * POSITIONS  # tokens of an answer
ROUNDING = 2e-6  # error in L1 of float32 rounding over a vocabulary
IDENTITY = ("worker", "T", "K")
_NUMBERS: dict[Scheme, str] = {"renormalise": "5", "spread": "6"}  # equations
_SLOTS = 32  # answers that share the passes
_CONTEXT = 512

Logits = NDArray[np.float32]
Sums = Mapping[str, float]


class Ensemble:
    """Two workers and a drafter that reads their answers; all run in this process.

    worker: artifact of the second worker. Raises `UnsupportedError` if its vocabulary differs.
    """

    def __init__(self, bench: Bench, worker: Path) -> None:
        bench.expect_common_vocabulary()
        draft, target = bench.pair.paths
        self._vocabulary = bench.pair.vocabularies
        if Artifact.open(worker).manifest.vocab_size != bench.pair.target.vocab_size:
            raise UnsupportedError(
                f"The worker {worker} has another vocabulary than the target: the workers of a "
                "federation need the same tokens."
            )
        self._engines = [_open(path, bench) for path in (target, worker)]
        self._drafter = _open(draft, bench)
        self.vocab = bench.pair.target.vocab_size

    def answer(
        self, prompts: Sequence[str], temperature: float, seed: int
    ) -> Iterator[tuple[list[Logits], Logits]]:
        """Sample answers of at most `ANSWER` tokens to at most `_SLOTS` prompts.

        Prompt p has the seed ``seed`` + p. Yields for each prompt the logits at the n positions of
        its answer: f32 [n, V] of each worker, and f32 [n, V] of the drafter.
        """
        texts = [self._vocabulary.prompt(prompt).ids for prompt in prompts]
        begins = [len(text) for text in texts]
        rows: list[list[list[Logits]]] = [[] for _ in texts]
        open_slots = [*range(len(texts))]
        while open_slots:
            works = [Work(slot, texts[slot], 1) for slot in open_slots]
            outputs = [engine.run(works) for engine in self._engines]
            for slot, *scores in zip(open_slots, *outputs, strict=True):
                rows[slot].append([score.logits[0].copy() for score in scores])
                token = self._sample(rows[slot][-1], temperature, seed + slot, len(rows[slot]))
                texts[slot] = np.append(texts[slot], np.uint32(token))
            ends = self._vocabulary.target.eos_ids
            open_slots = [
                slot
                for slot in open_slots
                if len(rows[slot]) < ANSWER and int(texts[slot][-1]) not in ends
            ]
        for slot, text in enumerate(texts):
            work = Work(slot, text[:-1], len(text) - begins[slot])
            drafted = self._drafter.run([work])[0].logits.copy()
            yield [np.stack(worker) for worker in zip(*rows[slot], strict=True)], drafted

    def _sample(
        self, logits: Sequence[Logits], temperature: float, seed: int, position: int
    ) -> int:
        """Sample a token from the average of the workers' whole distributions."""
        whole = [top_rows(row[None], temperature, self.vocab) for row in logits]
        p = aggregate(WEIGHTS, whole, self.vocab, "renormalise")[0]
        return sample(p, noise(self.vocab, seed, Purpose.TARGET, position))


def _open(path: Path, bench: Bench) -> Engine:
    return open_engine(path, slots=_SLOTS, context=_CONTEXT, threads=bench.threads)


def compare(
    workers: Sequence[Logits], drafter: Logits, temperature: float, sizes: Sequence[int]
) -> dict[int, Sums]:
    """Compute sums over the positions of one answer, for each K of ``sizes``.

    workers, drafter: logits [n, V] each. The sums are those of ρ, both errors, both changes of
    acceptance and their bounds; ``beyond`` counts values above their bounds; ``bytes`` is the mean
    size of a worker's frames.
    """
    law = Sampling(temperature=temperature)
    exact = [probabilities(logits.astype(np.float64), law) for logits in workers]
    average: Values = np.tensordot(np.array(WEIGHTS), np.stack(exact), 1)
    q = probabilities(drafter.astype(np.float64), law)
    vocab = drafter.shape[1]
    results: dict[int, Sums] = {}
    for top_k in sizes:
        answers = [top_rows(logits, temperature, top_k) for logits in workers]
        retained = np.minimum([rows.retained_mass for rows in answers], 1.0)
        values: dict[str, Values] = {"positions": np.ones(len(q)), "beta": beta(average, q)}
        values |= {f"rho_{at}": rho for at, rho in enumerate(retained, 1)}
        values["bias_17"] = bias_bound(WEIGHTS, retained)
        values["vary_19"] = acceptance_bound(WEIGHTS, retained)
        values["beyond"] = np.zeros(len(q))
        for scheme, equation in _NUMBERS.items():
            merged = aggregate(WEIGHTS, answers, vocab, scheme)
            bias = reconstruction_error(merged, average)
            vary = acceptance_variation(merged, average, q)
            values |= {f"bias_{equation}": bias, f"vary_{equation}": vary}
            values["beyond"] += bias > values["bias_17"] + ROUNDING
            values["beyond"] += vary > values["vary_19"] + ROUNDING / 2.0
        sums = {name: float(each.sum()) for name, each in values.items()}
        results[top_k] = sums | {"bytes": _frame_bytes(answers, vocab)}
    return results


def _frame_bytes(answers: Sequence[TopRows], vocab: int) -> float:
    """Compute the mean bytes of a worker's frames for windows of `POSITIONS`, in fp16."""
    sizes = [
        len(encode_topk(TopRows(rows.ids[at:end], rows.values[at:end]), vocab, "fp16"))
        for rows in answers
        for at in range(0, len(rows), POSITIONS)
        if (end := at + POSITIONS) <= len(rows)
    ]
    return float(np.mean(sizes)) if sizes else float("nan")


def summarize(prompts: Sequence[Sums], vocab: int, names: Sequence[str]) -> dict[str, Value]:
    """Compute means over all positions, with intervals over prompts, from the sums of `compare`.

    names: the sums to include.
    """
    weights = resample_weights(len(prompts))  # [1 + resamples, prompts]
    counts = weights @ np.array([each["positions"] for each in prompts])
    row: dict[str, Value] = {"n": len(prompts), "positions": int(counts[0])}
    for name in names:
        totals = weights @ np.array([each[name] for each in prompts])
        row |= interval(name, totals / counts)
    size = float(np.nanmean([each["bytes"] for each in prompts]))
    full = upload_bits(POSITIONS, vocab, vocab, 16) / 8.0
    beyond = int(sum(each["beyond"] for each in prompts))
    return row | {"bytes": size, "bytes_share": size / full, "beyond": beyond}


def describe(worker: Path) -> tuple[str, str]:
    """Name a worker by its precision and its layers; return its digest, too."""
    manifest = Artifact.open(worker).manifest
    return f"{manifest.precision}, {manifest.dimensions.layers} layers", manifest.digest


class Measurement:
    """The measurement that both figures share: within a process it runs once for each worker."""

    def __init__(self) -> None:
        # the sums of each prompt by T and K, for each bench and worker
        self._sums: dict[tuple[object, ...], dict[float, list[dict[int, Sums]]]] = {}

    def measure(
        self, bench: Bench, done: Container[Identity], *, names: Sequence[str]
    ) -> Iterator[Row]:
        """Yield a row for each worker, T and K that is not in ``done``.

        names: the sums of `compare` to include. The rows of a worker are measured together.
        """
        workers = bench.workers()
        if not workers:
            raise UnsupportedError(
                "A federation needs a second worker beside the target: name its artifact by "
                "--worker."
            )
        vocab = bench.pair.target.vocab_size
        sizes = [k for k in SIZES if k < vocab]
        if len({describe(worker)[0] for worker in workers}) < len(workers):
            raise UnsupportedError(
                "Two workers have the same precision and number of layers, so the table could not "
                "tell them apart: measure them by two commands, with another --save each."
            )
        for worker in workers:
            name, digest = describe(worker)
            missing = [case for case in product(TEMPERATURES, sizes) if (name, *case) not in done]
            sums = self._answer(bench, worker, sizes) if missing else {}
            for temperature, top_k in missing:
                case: Row = {"worker": name, "T": temperature, "K": top_k}
                prompts = [each[top_k] for each in sums[temperature]]
                values = summarize(prompts, vocab, names)
                yield {**case, "worker_digest": digest, "share": top_k / vocab, **values}

    def _answer(
        self, bench: Bench, worker: Path, sizes: Sequence[int]
    ) -> dict[float, list[dict[int, Sums]]]:
        """Return the sums by T, prompt and K; answer the prompts unless that was done before."""
        key = (*bench.pair.paths, worker, bench.prompts, bench.seed)
        if key not in self._sums:
            ensemble, name = Ensemble(bench, worker), describe(worker)[0]
            sums: dict[float, list[dict[int, Sums]]] = {each: [] for each in TEMPERATURES}
            for temperature, results in sums.items():
                stage = f"answers with {name} at temperature {temperature:g}"
                for first in range(0, len(bench.prompts), _SLOTS):
                    bench.report(stage, first, len(bench.prompts))
                    prompts = bench.prompts[first : first + _SLOTS]
                    answers = ensemble.answer(prompts, temperature, bench.seed + first)
                    for at, (logits, drafter) in enumerate(answers, first):
                        bench.report(stage, at, len(bench.prompts))
                        results.append(compare(logits, drafter, temperature, sizes))
                bench.report(stage, len(bench.prompts), len(bench.prompts))
            self._sums[key] = sums
        return self._sums[key]


_BOTH = Measurement()
_BEGIN: dict[str, tuple[str, int | None]] = {
    "worker": ("worker 2", None),
    "T": ("T", 1),
    "K": ("K", 0),
}
_END: dict[str, tuple[str, int | None]] = {"n": ("prompts", 0), "positions": ("positions", 0)}
_NOTE = (
    "The paper prints no numbers. Worker 1 is the target, both weights are ½; worker 2 has the "
    "precision and the layers in the table. "
)
FIGURE2 = Figure(
    key="figure2",
    draw=partial(draw_figure, "figure2"),
    title="Figure 2, measured: L1 error of the average, by T and K",
    columns={
        **_BEGIN,
        "rho_1": ("ρ₁", 3),
        "rho_2": ("ρ₂", 3),
        **interval_columns("bias_5", "bias (5)", 4),
        **interval_columns("bias_6", "bias (6)", 4),
        "bias_17": ("≤ (17)", 4),
        "beyond": ("beyond", 0),
        "bytes": ("bytes", 0),
        **_END,
    },
    identity=IDENTITY,
    measure=partial(_BOTH.measure, names=("rho_1", "rho_2", "bias_5", "bias_6", "bias_17")),
    minutes=1.0,
    note=_NOTE
    + "(5) renormalises, (6) spreads. Beyond: positions that violate (17) or (19). Bytes: "
    f"a worker's frame for {POSITIONS} positions, in fp16.",
)
FIGURE3 = Figure(
    key="figure3",
    draw=partial(draw_figure, "figure3"),
    title="Figure 3, measured: change of the acceptance, by T and K",
    columns={
        **_BEGIN,
        "beta": ("β", 3),
        **interval_columns("vary_5", "Δβ (5)", 4),
        **interval_columns("vary_6", "Δβ (6)", 4),
        "vary_19": ("≤ (19)", 4),
        "beyond": ("beyond", 0),
        **_END,
    },
    identity=IDENTITY,
    measure=partial(_BOTH.measure, names=("beta", "vary_5", "vary_6", "vary_19")),
    minutes=1.0,
    note=_NOTE + "β: acceptance of the drafter by the average. Δβ: mean of |β̃ − β|; (5) "
    "renormalises, (6) spreads. Beyond: positions that violate (17) or (19).",
)
