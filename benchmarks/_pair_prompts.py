"""What a pair is asked: questions from a file, and chats of many kinds."""

import json
from pathlib import Path
from typing import NamedTuple, TypeAlias

Message: TypeAlias = "dict[str, str]"


class Prompt(NamedTuple):
    """A user's text, or a conversation. kind: "question" or "chat"."""

    name: str
    kind: str
    content: "str | list[Message]"

    @property
    def messages(self) -> list[Message]:
        """As chat templates want it."""
        return [_user(self.content)] if isinstance(self.content, str) else self.content


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


_BROKEN = """\
```python
def mean(numbers):
    total = 0
    for n in numbers:
        total += n
    return total / len(number)
```"""

# Half of them plain instructions, code, and data; the rest other languages, and conversations.
CHATS: tuple["str | list[Message]", ...] = (
    "What is the capital of Australia, and what is it known for?",
    "Write a Python function that checks whether a string is a palindrome, with a docstring.",
    'Wie funktioniert ein Kühlschrank? Erkläre es in drei Sätzen, die Wörter "Wärme" und "Druck" '
    "sollen vorkommen.",
    "List ten countries of Europe and their capitals as a numbered list.",
    [
        _user("What is a hash table?"),
        _assistant("A hash table stores values under keys, and finds them in constant time."),
        _user("And what happens when two keys have the same hash?"),
    ],
    "Return only JSON: an array of three books, each with title, author, year and tags.",
    "用中文简单介绍一下长城的历史。",
    "Write a SQL query that counts the orders of each customer in 2024, most orders first.",
    "Tell me a short story about a fish that swims ahead of a shark.",
    [
        _system("You are a reviewer of Python code. You answer with the corrected code first."),
        _user(f"Why does this fail?\n\n{_BROKEN}"),
    ],
    "Écris un courriel poli pour décliner une réunion jeudi à 14 h.",
    "Make a Markdown table of the planets: name, diameter in km, number of moons.",
    "Implement a binary search over a sorted `Vec<i64>` in Rust, without recursion.",
    [
        _user("Ich heiße Jürgen und wohne in Köln. 😀"),
        _assistant("Freut mich, Jürgen! Wie ist das Wetter in Köln? ☔"),
        _user("Es regnet. Where do I live, and what is my name? Answer in English."),
    ],
    "Напиши короткое стихотворение о море.",
    "A shop sells pens at 3 for $2. How much do 27 pens cost? Show each step.",
    "What does the regular expression ^\\d{4}-(0[1-9]|1[0-2])-\\d{2}$ match? Give two examples.",
    "Traduce al español, al francés y al alemán: 'Good morning, how are you today?'",
    [
        _system("Answer in one sentence."),
        _user("Who wrote 'Faust'?"),
        _assistant("Johann Wolfgang von Goethe wrote it, in two parts."),
        _user("When was the second part published?"),
        _assistant("It was published in 1832, after his death."),
        _user("Summarise its plot."),
    ],
    "日本語で、緑茶のいれ方を箇条書きで三つのステップにまとめてください。",
)


def questions(path: Path, count: int) -> list[Prompt]:
    """The first questions of a JSON-lines file, whose objects have a "question" each."""
    with path.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["question"] for line, _ in zip(lines, range(count), strict=False)]
    return [Prompt(f"q{at:02}", "question", text) for at, text in enumerate(texts)]


def chats(count: int) -> list[Prompt]:
    """The first of `CHATS`."""
    return [Prompt(f"c{at:02}", "chat", wanted) for at, wanted in enumerate(CHATS[:count])]
