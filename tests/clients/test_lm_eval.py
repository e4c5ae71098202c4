"""lm-eval's local-completions with the remote tokenizer, as docs/clients.md starts it.

Its tasks are in hubs; here a task of three choices and one of a free answer stand for them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.clients.conftest import skip_without
from tests.clients.documented import block
from tests.support.serving import Serving

CHOICES = """\
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: ["a", "ba", "tru"]
doc_to_target: answer
metric_list: [{metric: acc}]
"""
WORDS = """\
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "ba"
generation_kwargs: {until: ["x"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""
QUESTIONS = [{"question": f"ab {at}", "answer": at % 3} for at in range(10)]


def test_lm_eval(service: Serving, run: Callable[..., str], tmp_path: Path) -> None:
    skip_without(".py")
    (tmp_path / "choices.yaml").write_text(CHOICES)
    (tmp_path / "words.yaml").write_text(WORDS)
    lines = "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    (tmp_path / "questions.jsonl").write_text(lines)
    command = block("lm-eval", "sh").at(service.url).replace("\\\n", " ")
    assert "--batch_size 4" in command
    command = command.replace("arc_easy", "choices,words")
    before = service.metric("pilotfish_requests_total")
    run(*shlex.split(command), "--include_path", tmp_path, "--output_path", tmp_path / "results")
    (path,) = (tmp_path / "results").rglob("results_*.json")
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    assert 0 <= results["choices"]["acc,none"] <= 1
    assert 0 <= results["words"]["exact_match,none"] <= 1
    assert service.metric("pilotfish_requests_total") - before < 4 * len(QUESTIONS)
