"""What a directory's files say of its tokens, as transformers' newest releases read them.

Each checkpoint is written, and read by both: the tokens by their names, and the ids of several
chats, must be equal, or the checkpoint is refused in a sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from pilotfish.engines.engine_errors import TemplateError
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.huggingface import DirectorySource
from pilotfish.export.sources.huggingface_tokenizer import read_templates
from pilotfish.export.tokenizers.roles import (
    CLASS_OF_MODEL_TYPE,
    CLASSES,
    MISNAMED,
    tokenizer_class,
)
from tests.support.small_checkpoints import LLAMA, tokenizer_json, write_directory

pytestmark = pytest.mark.reference
TEMPLATES = Path(__file__).parent.parent / "data" / "templates"
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")
FIRST = 260  # the id of the first of them
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = "{{ %s }}{%% for m in messages %%}{{ m.content }}{%% endfor %%}"
TOOLS = '{% if tools %}<tool_call>{{ tools[0].function.name }}"arguments"{% endif %}'
CONFIG: dict[str, Any] = {"bos_token_id": 263, "eos_token_id": 262}
SETTINGS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
TOOL = {"type": "function", "function": {"name": "get", "description": "a <b>", "parameters": {}}}
USER = {"role": "user", "content": "Hi <b> & 'q' ünï 🐟"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "<think>so</think>Hello"}
AGAIN = {"role": "user", "content": "  spaced  \n"}
CALL = {"id": "call12345", "type": "function", "function": {"name": "get", "arguments": {"a": "b"}}}
CALLED = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call12345", "name": "get", "content": "found"},
]
CHATS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([USER], None),
    ([SYSTEM, USER], None),
    ([USER, ANSWER, AGAIN], None),
    ([SYSTEM, USER, {**ANSWER, "reasoning_content": "why"}, AGAIN], None),
    ([SYSTEM, USER], [TOOL]),
    (CALLED, [TOOL]),
]


def token(content: str, **flags: bool) -> dict[str, Any]:
    names = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return {"content": content} | {name: flags.get(name, False) for name in names}


# (config.json, tokenizer_config.json, template, further files)
Case = tuple[dict[str, Any], dict[str, Any], str, dict[str, Any]]
CASES: dict[str, Case] = {
    "bos null, as in Qwen 2": ({"bos_token_id": 260}, {"bos_token": None}, CHATML, {}),
    "another bos": ({"bos_token_id": 260, "eos_token_id": 260}, {}, CHATML, {}),
    "no bos in the configuration": ({"bos_token_id": None}, {}, CHATML, {}),
    "an end of the tokenizer alone": ({"eos_token_id": 260}, {}, CHATML, {}),
    "several ends": ({"eos_token_id": [260, 262]}, {}, NAMES % "bos_token ~ eos_token", {}),
    "pad and unk": (
        {}, {"pad_token": "<|endoftext|>", "unk_token": "</s>"},
        NAMES % "pad_token ~ unk_token", {},
    ),
    "a token of its own": (
        {}, {"extra_special_tokens": {"image_token": "<|endoftext|>"}}, NAMES % "image_token", {},
    ),
    "a token of its own, as its own key": (
        {}, {"image_token": "<|endoftext|>"}, NAMES % "image_token", {},
    ),
    "no end but the tokenizer's": ({"eos_token_id": None}, {}, CHATML, {}),
    "ends in generation_config": (
        {"eos_token_id": None}, {}, CHATML,
        {"generation_config.json": {"eos_token_id": [262, 260]}},
    ),
    "parts": (
        {}, {},
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}", {},
    ),
    "functions": (
        {}, {},
        "{%- set ns = namespace(a='') -%}{{ strftime_now('%Y') }}{% for m in messages[::-1] %}"
        "{% for k, v in m.items() %}{{ k ~ v }}{% endfor %}{% if loop.index0 == 1 %}{% break %}"
        "{% endif %}{% endfor %}{{ messages | selectattr('role', 'equalto', 'user') | list | "
        "length }}{{ {'a': 'ü'} | tojson }}", {},
    ),
    "defaults of variables": (
        {}, {},
        "{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
        "{%- if tools is not none %}T{% endif %}{{ date_string }}{% for m in messages %}"
        "{{ m['content'] | trim }}{% endfor %}{{ bos_token is defined }}{{ pad_token is defined }}",
        {},
    ),
    "an older map counts": (
        {}, {"bos_token": "</s>"}, CHATML, {"special_tokens_map.json": {"bos_token": "<s>"}},
    ),
    "an older map does not count": (
        {}, {"added_tokens_decoder": {str(262): token("<|im_end|>", special=True)}}, CHATML,
        {"special_tokens_map.json": {"bos_token": "<|endoftext|>"}},
    ),
    "flags of the settings": (
        {}, {"added_tokens_decoder": {str(262): token("<|im_end|>", special=True, rstrip=True)}},
        CHATML, {},
    ),
    "no longer special": (
        {}, {"added_tokens_decoder": {str(261): token("<|im_start|>", normalized=True)}}, CHATML,
        {},
    ),
    "beside tokenizer.json": ({}, {}, CHATML + "<a>", {"added_tokens.json": {"<a>": 265}}),
    "beside it, in the settings": (
        {}, {"added_tokens_decoder": {"265": token("<a>", special=True)}}, CHATML + "<a>", {},
    ),
    "beside it, with another id": (
        {}, {"added_tokens_decoder": {"270": token("<a>", special=True)}}, CHATML + "<a>", {},
    ),
    "a word of the vocabulary": ({}, {"eos_token": "the"}, CHATML + "{{ eos_token }}", {}),
    "a token that is nowhere": ({}, {"pad_token": "[PAD]"}, NAMES % "pad_token", {}),
    "a token that is nowhere and not written": ({}, {"pad_token": "[PAD]"}, CHATML, {}),
    "a list with a token that is nowhere": (
        {}, {"additional_special_tokens": ["[X]"]}, CHATML + "[X]", {},
    ),
    "a class of tokens": (
        {}, {"tokenizer_class": "GPT2Tokenizer", "bos_token": None},
        NAMES % "bos_token ~ unk_token", {},
    ),
    "added by tokenizer.json alone": (
        {}, {"tokenizer_class": "Qwen2Tokenizer",
             "added_tokens_decoder": {"262": token("<|im_end|>", special=True)}}, CHATML, {},
    ),
    "an empty token": (
        {}, {"pad_token": ""}, NAMES % "(pad_token is defined) ~ pad_token", {},
    ),
    "an object that is not called a token": (
        {}, {"image_token": token("<s>")}, NAMES % "image_token is defined", {},
    ),
    "an object that is called a token": (
        {}, {"image_token": {"__type": "AddedToken", **token("<s>")}}, NAMES % "image_token", {},
    ),
    "what only the class has": (
        {}, {"tokenizer_class": "GPTNeoXTokenizer"}, NAMES % "pad_token", {},
    ),
    "split": ({}, {"split_special_tokens": True}, CHATML, {}),
    "a space before": (
        {}, {"add_prefix_space": True, "tokenizer_class": "GPT2Tokenizer"}, CHATML, {},
    ),
    "a folder of templates": ({}, {}, CHATML, {"additional_chat_templates/tool_use.jinja": TOOLS}),
    "a folder hides the list": (
        {}, {"chat_template": [{"name": "tool_use", "template": "old"}]}, CHATML, {},
    ),
}  # fmt: skip
REFUSED = {
    "beside it, with another id", "a token that is nowhere", "a list with a token that is nowhere",
    "split", "a space before", "added by tokenizer.json alone", "what only the class has",
}  # fmt: skip


def written(folder: Path, case: Case) -> Path:
    """Write a checkpoint: the small tokenizer with `TOKENS`, and what the case says."""
    config, settings, template, files = case
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in TOKENS])
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", **SETTINGS, **settings}
    (folder / "additional_chat_templates").mkdir(parents=True)
    files = {"tokenizer_config.json": stated, "chat_template.jinja": template, **files}
    write_directory(folder, LLAMA | {"vocab_size": 280} | CONFIG | config, files=files)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return folder


def compare(folder: Path) -> int:
    """Compare the ids of all chats that transformers renders; return how many."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = DirectorySource(folder, lambda *step: None).vocabulary
    known = Tokenizer.from_str(ours.tokenizer_json).get_vocab()
    named = {
        name: item for name, item in theirs.special_tokens_map.items() if not item or item in known
    }
    assert ours.special_tokens == named
    end = theirs.eos_token_id
    assert end is None or end in ours.eos_ids
    rendered = 0
    for chat, tools in CHATS:
        speaker = ours.with_tools if tools else ours
        for prompt in (True, False):
            how: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}
            assert speaker.template is not None
            try:
                expected = theirs.apply_chat_template(chat, tokenize=False, **how)
            except Exception:
                with pytest.raises(TemplateError):
                    speaker.template.render(chat, **how)
                continue
            assert speaker.template.render(chat, **how) == expected
            ids = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **how)
            if prompt:
                assert speaker.dialogue is not None
                assert list(speaker.dialogue.ids(chat, tools=tools)) == ids
            assert speaker.tokenizer.encode(expected, special=True) == ids
            rendered += 1
    return rendered


@pytest.mark.parametrize("name", CASES)
def test_ids_are_transformers_or_the_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", CASES[name])
    if name in REFUSED:
        with pytest.raises(ExportError):
            DirectorySource(folder, lambda *step: None)
    else:
        assert compare(folder) >= 6


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3", "mistral"])
def test_published_templates(name: str, tmp_path: Path) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    assert compare(written(tmp_path / "model", ({}, {}, source, {}))) >= 4


def test_the_template_is_the_one_that_transformers_takes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    listed = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "older"}]
    for case, files in enumerate(
        (
            {"chat_template.jinja": "new"},
            {"chat_template.jinja": "new", "additional_chat_templates/rag.jinja": "r"},
            {"additional_chat_templates/rag.jinja": "r"},
            {},
        )
    ):
        folder = written(tmp_path / str(case), ({}, {"chat_template": listed}, "", files))
        if "chat_template.jinja" not in files:
            (folder / "chat_template.jinja").unlink()
        theirs = AutoTokenizer.from_pretrained(folder).chat_template
        usual, named = read_templates(folder)
        results = {**named, **({} if usual is None else {"default": usual})}
        assert results == (theirs if isinstance(theirs, dict) else {"default": theirs})


def test_classes_have_the_tokens_that_transformers_gives_them() -> None:
    import inspect

    from transformers.models.auto import tokenization_auto as auto

    for name, tokens in CLASSES.items():
        result = auto.tokenizer_class_from_name(name)
        parameters = inspect.signature(result.__init__).parameters
        stated = {
            key: str(parameter.default)
            for key, parameter in parameters.items()
            if key.endswith("_token") and isinstance(parameter.default, str)
        }
        assert tokens == stated, name
    for model_type, name in CLASS_OF_MODEL_TYPE.items():
        theirs = auto.TOKENIZER_MAPPING_NAMES.get(model_type)
        assert (theirs or name) == (name or "TokenizersBackend"), model_type
    assert MISNAMED <= auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "mistral", "phi", "gpt2", "olmo"]
)
@pytest.mark.parametrize("stated", [None, "LlamaTokenizerFast", "GPT2Tokenizer", "FooTokenizer"])
def test_the_class_is_the_one_that_transformers_takes(
    model_type: str, stated: str | None, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    config = LLAMA | {"model_type": model_type}
    settings = {} if stated is None else {"tokenizer_class": stated}
    files = {"config.json": config, "tokenizer_config.json": settings}
    folder = write_directory(tmp_path / "model", files=files)
    theirs = AutoTokenizer.from_pretrained(folder)
    name = tokenizer_class(settings, config, byte_level=True)
    assert CLASSES.get(name, {}) == dict(theirs.special_tokens_map)
