"""What `ahead.py` asks: questions, chats, texts that repeat themselves, and long prompts."""

import json
from pathlib import Path
from typing import Any

from _common import PROMPTS
from _pair_prompts import CHATS

_CODE = '''\
```python
import json
from pathlib import Path


def read_orders(path: Path) -> list[dict]:
    """Read all orders of a file, one JSON object a line."""
    orders = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            order = json.loads(line)
            if order["amount"] > 0:
                orders.append(order)
    return orders


def total_of(orders: list[dict], customer: str) -> float:
    """Sum the amounts of one customer's orders."""
    total = 0.0
    for order in orders:
        if order["customer"] == customer:
            total += order["amount"]
    return total
```'''

_TEXT = """\
The harbour of Varnholm was dug in 1874, when the old quay had become too shallow for steamers. \
The engineer Ida Lindqvist planned two basins: an outer one for ships that only wait for the \
tide, and an inner one, behind a lock, for those that load timber. In the winter of 1881 the \
lock froze, and for nine weeks no ship could leave the inner basin. The town then built a boiler \
house beside the lock, whose steam kept the gates free of ice. The boiler house burned down in \
1923 and was not rebuilt, since by then most timber went by rail. Today the inner basin is a \
marina, and the outer basin serves the ferry to the islands, which leaves twice a day."""

REPEATING: dict[str, tuple[str, ...]] = {
    "edit": (
        f"Rename the variable `orders` to `found` in this code, and give back all of it:\n{_CODE}",
        f"Give back this code with a type hint for every variable:\n{_CODE}",
        f"Add a comment above each loop, and repeat the whole code:\n{_CODE}",
        f"Repeat this code exactly as it is:\n{_CODE}",
    ),
    "summary": (
        f"Summarise this text in the words of the text itself:\n\n{_TEXT}",
        f"Copy the three most important sentences of this text:\n\n{_TEXT}",
        f"Turn this text into a list, one point a sentence:\n\n{_TEXT}",
        f"Correct the spelling of this text, and give back all of it:\n\n{_TEXT}",
    ),
    "chat": PROMPTS[:4],
}


def questions(path: Path | None, count: int) -> list[Any]:
    """So many prompts: of a JSON-lines file with a "question" a line, or the benchmarks' own."""
    if path is None:
        every: list[Any] = [*PROMPTS, *CHATS]
        return [every[at % len(every)] for at in range(count)]
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["question"] for line, _ in zip(lines, range(count), strict=False)]


def long_prompt(number: int, tokens: int, count: Any) -> str:
    """A prompt of about so many tokens that begins like no other; count: tokens of a text."""
    text = f"Logbook {number} of the survey ship, page {97 * number + 11}.\n"
    entry = 0
    while count(text) < tokens:
        entry += 1
        text += (
            f"Entry {entry * (number + 3)}: at {entry % 24:02}:{(7 * entry) % 60:02} the sounding "
            f"was {13 + (entry * 37 + number) % 400} metres, the wind {(entry + number) % 9}, "
            "and the crew saw nothing but water.\n"
        )
    return text + "What is this logbook about? Answer in a few sentences."
