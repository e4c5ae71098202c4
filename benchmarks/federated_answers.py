"""Sample from a federation of two workers: arbitrary tokens, and answers under a grammar.

    python benchmarks/federated_answers.py [--json PATH] [--quick] [--tokens N] [--answers N]
                                           [--settings NAME …]

Two workers in processes of their own (the default model in fp32, weight 0.7, and in int4 with an
int8 head, weight 0.3) and an edge over them serve 40 texts at temperature 1 under protocol
``stream``, with each reconstruction. p is the probability of each token in the average of the
workers' whole distributions, which this process computes after the text. "arbitrary" counts the
tokens with p < 10⁻⁵, "rho" is the mean retained mass.

Then the federation answers under a JSON schema, with bias and penalties too. "parsed" counts the
answers that ended and are JSON of the schema; "outside" is the probability that the unconstrained
average gives to tokens that the grammar forbids, "mask" the mean bytes of a position's mask to each
worker.

Goals: at most one of 1,000 tokens is arbitrary under the default, every answer parses, and no token
is one that the grammar forbids.
"""

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from _common import PROMPTS, Rows, Steps, at_most, conclude, options
from numpy.typing import NDArray

from pilotfish import Device, Generation
from pilotfish.cli.export import default_artifact
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Work, open_engine
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.speculation.logits_options import Grammar, LogitsOptions, LogitsProcessor
from pilotfish.wire.codecs.masks import encode_masks
from tests.support.daemons import free_port, scrape
from tests.support.federating import Running, federation

WEIGHTS = (0.7, 0.3)
RARE = 1e-5  # p below which a token counts as arbitrary
LENGTH = 25  # tokens of a text
DEVICES = 5  # devices that ask at the same time
SETTINGS: dict[str, dict[str, Any]] = {
    "default (renormalise, K = 64)": {},
    "spread, K = 64": {"reconstruction": "spread"},
    "renormalise, auto, rho = 0.99": {"kept": "auto", "rho": 0.99},
    "spread, auto, rho = 0.99": {"kept": "auto", "rho": 0.99, "reconstruction": "spread"},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 24},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"enum": ["sea", "sky", "land"]}, "maxItems": 3},
        "good": {"type": "boolean"},
    },
    "required": ["title", "year", "tags", "good"],
    "additionalProperties": False,
}
SHAPE = {"frequency_penalty": 0.2, "repetition_penalty": 1.05, "logit_bias": {28: -0.5}}
# the answers under the schema use these protocols in turn
PROTOCOLS = ("stream", "tslt", "coupled", "ahead")
COLUMNS = ("setting", "answers", "tokens", "arbitrary", "rho", "parsed", "outside", "mask")


class Average:
    """The uncompressed average of the workers' whole distributions at temperature 1."""

    def __init__(self, workers: list[Path]) -> None:
        self._engines = [open_engine(path, context=512, threads=1) for path in workers]
        self.vocabulary = Vocabulary.from_artifact(Artifact.open(workers[0]))

    def rows(self, prompt: list[int], answer: list[int]) -> Floats:
        """Return p at each position of an answer, f64 [n, V]."""
        tokens, count = np.array([*prompt, *answer[:-1]], np.int64), len(answer)
        total: Floats = np.zeros((count, self.vocabulary.vocab_size))
        for weight, engine in zip(WEIGHTS, self._engines, strict=True):
            logits = engine.run([Work(0, tokens, count)])[0].logits.astype(np.float64)
            total += weight * probabilities(logits, Sampling(temperature=1.0))
        return total


class Bench:
    """A federation that serves with these settings, and the average to compare it with."""

    def __init__(
        self, name: str, running: Running, devices: list[Device], average: Average
    ) -> None:
        self._name, self._running, self._devices = name, running, devices
        self._average, self._vocabulary = average, average.vocabulary

    def _generate(self, count: int, **options: Any) -> list[tuple[list[int], Generation]]:
        """Return prompts and answers of ``count`` seeds; the devices ask at the same time."""

        def ask(device: int) -> list[tuple[list[int], Generation]]:
            answers = []
            for seed in range(device, count, len(self._devices)):
                prompt = self._prompt(seed)
                shape = {"protocol": PROTOCOLS[seed % len(PROTOCOLS)]} | options
                answers.append((prompt, self._devices[device].generate(prompt, seed=seed, **shape)))
            return answers

        with ThreadPoolExecutor() as pool:
            parts = pool.map(ask, range(len(self._devices)))
            return [answer for part in parts for answer in part]

    def _prompt(self, seed: int) -> list[int]:
        dialogue = self._vocabulary.dialogue
        assert dialogue is not None
        return list(dialogue.ids([{"role": "user", "content": PROMPTS[seed % 5]}]))

    def _rho(self) -> float:
        """The mean retained mass of all rows so far."""
        samples = scrape(self._running.metrics)
        omitted = samples["ensemble_omitted_mass_total"]
        return 1.0 - omitted / samples["ensemble_rows_total"]

    def texts(self, count: int, steps: Steps) -> dict[str, Any]:
        """Sample texts; count the tokens that the average would hardly ever choose."""
        drawn: list[NDArray[np.float64]] = []
        steps.next(f"{self._name}: {count} texts")
        options = {"protocol": "stream", "temperature": 1.0, "max_tokens": LENGTH}
        for prompt, answer in self._generate(count, **options):
            ids = list(answer.tokens)
            drawn.append(self._average.rows(prompt, ids)[np.arange(len(ids)), ids])
        p = np.concatenate(drawn)
        return {
            "setting": self._name,
            "answers": count,
            "tokens": len(p),
            "arbitrary": int((p < RARE).sum()),
            "rho": self._rho(),
        }

    def answers(self, count: int, steps: Steps) -> dict[str, Any]:
        """Answer under the schema, with bias and penalties, by several protocols."""
        grammar = Grammar.from_schema(SCHEMA)
        figures: dict[str, list[float]] = {"parsed": [], "forbidden": [], "outside": [], "mask": []}
        steps.next(f"{self._name}: {count} answers under a schema")
        options = {"temperature": 1.0, "max_tokens": 200, "schema": SCHEMA, **SHAPE}
        for prompt, answer in self._generate(count, **options):
            figures["parsed"].append(fits(answer))
            ids = list(answer.tokens)
            constraint = self._vocabulary.grammars.constraint(grammar)
            processor = LogitsProcessor(LogitsOptions(grammar=grammar), len(prompt), constraint)
            for at, row in enumerate(self._average.rows(prompt, ids)):
                text = np.array([*prompt, *ids[:at]], np.uint32)
                stated, _ = processor.state(text, [()], self._vocabulary.vocab_size)
                assert stated.masks is not None
                allowed = stated.masks.unpack()[0]
                figures["forbidden"].append(not allowed[ids[at]])
                figures["outside"].append(float(row[~allowed].sum()))
                figures["mask"].append(len(encode_masks(stated.masks)))
        return {
            "setting": f"{self._name}, schema",
            "answers": count,
            "tokens": len(figures["mask"]),
            "parsed": int(sum(figures["parsed"])),
            "forbidden": int(sum(figures["forbidden"])),
            "outside": float(np.mean(figures["outside"])),
            "mask": float(np.mean(figures["mask"])),
        }


def fits(answer: Generation) -> bool:
    """Return whether an answer ended, and is JSON of the schema."""
    if answer.finish_reason != "stop":
        return False
    value = json.loads(answer.text)
    return (
        set(value) == set(SCHEMA["properties"])
        and len(value["title"]) <= 24
        and 1900 <= value["year"] <= 2100
        and {*value["tags"]} <= {"sea", "sky", "land"}
        and isinstance(value["good"], bool)
    )


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=1000, help="sampled tokens of each setting")
    parser.add_argument("--answers", type=int, default=12, help="answers under the schema")
    parser.add_argument("--settings", nargs="+", metavar="NAME", help="beginnings of their names")
    args = parser.parse_args()
    texts, answers = (4, 4) if args.quick else (args.tokens // LENGTH, args.answers)
    workers = [default_artifact("fp32"), default_artifact("int4")]
    average, rows = Average(workers), Rows()
    names = [name for name in SETTINGS if name.startswith(tuple(args.settings or [""]))]
    steps = Steps(2 * len(names))
    for name in names:
        with (
            tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as folder,
            federation(
                Path(folder), workers, WEIGHTS, metrics=free_port(), **SETTINGS[name]
            ) as running,
            ExitStack() as stack,
        ):
            devices = [
                stack.enter_context(Device(workers[-1], running.endpoint, threads=1))
                for _ in range(DEVICES)
            ]
            bench = Bench(name, running, devices, average)
            rows += [bench.texts(texts, steps), bench.answers(answers, steps)]
    schema = [row for row in rows if "parsed" in row]
    goals = [
        *(
            at_most("arbitrary tokens of 1,000 by default", 40 * row["arbitrary"] / texts, 1)
            for row in rows
            if row["setting"] in list(SETTINGS)[:1]
        ),
        at_most("answers that do not parse", sum(r["answers"] - r["parsed"] for r in schema), 0),
        at_most("forbidden tokens", sum(row["forbidden"] for row in schema), 0),
    ]
    return conclude(args, "sampled answers of a federation of two", COLUMNS, rows, goals)


if __name__ == "__main__":
    sys.exit(main())
