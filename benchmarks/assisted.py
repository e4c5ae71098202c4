"""The pair under transformers' universal assisted generation, for reference.

    python benchmarks/assisted.py [--draft-source SOURCE] [--target-source SOURCE]
        [--questions FILE --count N] [--chats N] [--tokens N] [--json PATH] [--quick]

Sources are what `pilotfish export model` takes; both models are built of the same dequantised
weights, in fp32, with a thread for each core. Plain and assisted generation take turns prompt by
prompt: at temperature 0 with the assistant's own settings and with chains of four, at temperature
1, where texts cannot be compared, with its own settings. Between two vocabularies transformers
translates text at temperature 0, and drafts over the shared tokens at 1. "tokens_per_s" leaves
nothing out, "after_first" the target's first pass, which reads the prompt; "tokens_per_pass" counts
the passes after that one. Needs the extra 'reference', and is skipped without.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _common import Rows, Steps, conclude, options
from _pair_prompts import Prompt, chats, questions
from _peers import plain_theta

from pilotfish.engines.chat import ChatTemplate
from pilotfish.export.sources import WeightSource, open_source

COLUMNS = (
    *("case", "temperature", "answers", "equal", "tokens_per_pass"),
    *("tokens_per_s", "after_first", "ratio", "ratio_q1", "ratio_q3"),
)
CHAIN = 4
FAMILIES = {"llama": "Llama", "qwen2": "Qwen2"}  # whose weights a configuration says all of


@dataclass
class Answer:
    """One answer: its tokens, and when each of the target's passes ended (seconds from the start).

    The first pass reads the prompt.
    """

    tokens: list[int]
    total_s: float
    passes_s: list[float]

    @property
    def after_first(self) -> float:
        """Tokens a second after the first pass, which gives at least one."""
        first = self.passes_s[0]
        return (len(self.tokens) - 1) / (self.total_s - first) if len(self.tokens) > 1 else 0.0


@dataclass
class Case:
    """One way to generate. drafting: whether there is an assistant; chain: its fixed length."""

    name: str
    temperature: float
    drafting: bool = False
    chain: int | None = None
    answers: list[Answer] = field(default_factory=list)


class Peer:
    """A model as transformers has it."""

    def __init__(self, source: WeightSource) -> None:
        import torch
        import transformers

        config = source.config
        shape: dict[str, Any] = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden,
            "intermediate_size": config.intermediate,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "max_position_embeddings": config.context,
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": plain_theta(config)},
            "tie_word_embeddings": config.tied,
            "bos_token_id": source.vocabulary.bos_id,
            "eos_token_id": source.vocabulary.eos_ids,
            "pad_token_id": source.vocabulary.eos_ids[0],
        }
        weights = {name: _tensor(source.tensor(name)) for name in source.names()}
        family = FAMILIES[config.model_type]
        wanted = getattr(transformers, f"{family}Config")(**shape)
        kind: Any = getattr(transformers, f"{family}ForCausalLM")
        self.model = kind.from_pretrained(
            None, config=wanted, state_dict=weights, dtype=torch.float32
        ).eval()
        kind = transformers.PreTrainedTokenizerFast
        self.tokenizer = kind(
            tokenizer_object=_tokenizer(source),
            eos_token=_piece(source, source.vocabulary.eos_ids[0]),
        )

    def watch(self, ended: Callable[[], None]) -> None:
        """Have this called after each pass."""
        self.model.register_forward_hook(lambda *_: ended())


def _tensor(values: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def _tokenizer(source: WeightSource) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(source.vocabulary.tokenizer_json)


def _piece(source: WeightSource, token: int) -> str:
    return str(_tokenizer(source).id_to_token(token))


class Assisted:
    """Target and assistant, and how long they take."""

    def __init__(self, drafter: str, target: str) -> None:
        self._source = open_source(target)
        self._draft_source = open_source(drafter)
        self._target = Peer(self._source)
        self._target.watch(lambda: self._passes_s.append(time.perf_counter()))
        self._passes_s: list[float] = []
        self._assistant = Peer(self._draft_source)
        self._prunes = False
        vocabulary = self._source.vocabulary
        assert vocabulary.chat_template is not None
        self._template = ChatTemplate(vocabulary.chat_template, vocabulary.special_tokens or {})

    def answer(self, prompt: Prompt, case: Case, tokens: int, seed: int) -> Answer:
        """One more answer."""
        import torch

        text = self._template.render(prompt.messages)
        ids = self._target.tokenizer.encode(text, add_special_tokens=False)
        how: dict[str, Any] = {"do_sample": False}
        if case.temperature:
            how = {"do_sample": True, "temperature": case.temperature, "top_k": 0, "top_p": 1.0}
        if case.drafting:
            how |= self._assistance(case)
        torch.manual_seed(seed)
        self._passes_s.clear()
        begun_s = time.perf_counter()
        out = self._target.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=tokens,
            **how,
        )
        total_s = time.perf_counter() - begun_s
        return Answer(
            out[0, len(ids) :].tolist(), total_s, [passes_ - begun_s for passes_ in self._passes_s]
        )

    def _assistance(self, case: Case) -> dict[str, Any]:
        if case.temperature:
            self._prunes = True  # it cuts the assistant's head to the shared tokens, for good
        elif self._prunes:
            raise ValueError("temperature 0 comes first")
        settings = self._assistant.model.generation_config
        settings.num_assistant_tokens = case.chain or 20  # transformers' own default
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0 if case.chain else 0.4
        results = {"assistant_model": self._assistant.model}
        if self._draft_source.vocabulary.vocab_size == self._source.vocabulary.vocab_size:
            return results  # transformers takes no tokenizers then
        return results | {
            "tokenizer": self._target.tokenizer,
            "assistant_tokenizer": self._assistant.tokenizer,
        }


def row(case: Case, plain: Case) -> dict[str, object]:
    """The figures of a case, against plain generation at the same temperature."""
    ratios = [
        answer.after_first / other.after_first
        for answer, other in zip(case.answers, plain.answers, strict=True)
        if other.after_first
    ]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    equal = sum(a.tokens == b.tokens for a, b in zip(case.answers, plain.answers, strict=True))
    later = sum(len(answer.passes_s) - 1 for answer in case.answers)
    return {
        "case": case.name,
        "temperature": case.temperature,
        "answers": len(case.answers),
        "equal": equal if not case.temperature else "",
        "tokens_per_pass": sum(len(answer.tokens) - 1 for answer in case.answers) / later,
        "tokens_per_s": median(len(answer.tokens) / answer.total_s for answer in case.answers),
        "after_first": median(answer.after_first for answer in case.answers),
        "ratio": float(middle),
        "ratio_q1": float(low),
        "ratio_q3": float(high),
    }


def requests(args: argparse.Namespace) -> list[Prompt]:
    """The prompts that were asked for."""
    result = questions(args.questions, args.count) if args.questions else []
    return [*result, *chats(args.chats)]


def main() -> int:
    parser = options(__doc__)
    what = "what `pilotfish export model` takes (%(default)s)"
    parser.add_argument("--draft-source", default="default", metavar="SOURCE", help=what)
    parser.add_argument("--target-source", default="default", metavar="SOURCE", help=what)
    parser.add_argument("--questions", type=Path, metavar="FILE", help='JSON lines with "question"')
    parser.add_argument("--count", type=int, default=3, help="questions (%(default)s)")
    parser.add_argument("--chats", type=int, default=3, help="chat prompts (%(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer (%(default)s)")
    args = parser.parse_args()
    try:
        import torch
        import transformers
    except ImportError as error:
        print(f"skipped, for {error}: pip install 'pilotfish[reference]'", file=sys.stderr)
        return 0
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prompts, tokens = requests(args), args.tokens
    if args.quick:
        prompts, tokens = prompts[:2], min(tokens, 24)
    steps = Steps(2 * len(prompts) + 1)
    steps.next("loading both models")
    both = Assisted(args.draft_source, args.target_source)
    rows: Rows = []
    for temperature, cases in (
        (
            0.0,
            (
                Case("plain", 0.0),
                Case("assisted", 0.0, drafting=True),
                Case(f"assisted, chains of {CHAIN}", 0.0, drafting=True, chain=CHAIN),
            ),
        ),
        (1.0, (Case("plain", 1.0), Case("assisted", 1.0, drafting=True))),
    ):
        both.answer(prompts[0], cases[0], 4, 0)  # the first passes are slow ones
        for at, prompt in enumerate(prompts):
            steps.next(f"{prompt.name}, temperature {temperature:g}")
            for case in (*cases[at % len(cases) :], *cases[: at % len(cases)]):
                case.answers.append(both.answer(prompt, case, tokens, at))
        rows += [row(case, cases[0]) for case in cases]
    return conclude(args, "transformers' assisted generation, fp32", COLUMNS, rows, goals=[])


if __name__ == "__main__":
    sys.exit(main())
