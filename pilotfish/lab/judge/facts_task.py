"""Questions made by rule: write a short text that contains given facts.

In: a set of questions ("train", "dev" or "test") and a number. Out: questions, each with the facts
that a right answer contains. The wording of an answer is free, so many mismatches are harmless; an
answer that loses a fact is wrong. A small model (SmolLM2-135M) keeps all facts of about half of the
questions.

A question depends only on its set and its number, so the sets share no draws, and every machine
makes the same questions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from pilotfish.lab.judge.tasks import Question

SETS = ("train", "dev", "test")

_NAMES = [
    "Anna",
    "Tom",
    "Maria",
    "Paul",
    "Lucy",
    "Sam",
    "Emma",
    "Jack",
    "Nina",
    "Leo",
    "Clara",
    "Ben",
    "Alice",
    "Max",
    "Rosa",
    "Oscar",
]
_CITIES = [
    "Paris",
    "London",
    "Rome",
    "Madrid",
    "Berlin",
    "Vienna",
    "Oslo",
    "Lisbon",
    "Athens",
    "Dublin",
    "Prague",
    "Warsaw",
]
_COLOURS = ["red", "blue", "green", "yellow", "black", "white", "orange", "purple", "brown", "pink"]
_FRUITS = ["apples", "pears", "oranges", "lemons", "plums", "bananas"]
_ANIMALS = ["dog", "cat", "horse", "rabbit", "parrot", "goat", "hamster", "turtle"]
_JOBS = ["teacher", "doctor", "farmer", "baker", "pilot", "lawyer", "painter", "nurse"]
_THINGS = [
    "bicycle",
    "lamp",
    "jacket",
    "bag",
    "chair",
    "table",
    "guitar",
    "clock",
    "camera",
    "kettle",
]
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

# The text of a question, and the facts that a right answer contains
_Draft = tuple[str, Sequence[str]]


def _message(draw: random.Random) -> _Draft:
    reader, host = draw.sample(_NAMES, 2)
    day, hour, room = draw.choice(_DAYS), str(draw.randint(2, 11)), str(draw.randint(12, 98))
    text = (
        f"Write a short message to {reader} in two sentences. The facts: the meeting with {host} "
        f"is on {day} at {hour} o'clock in room {room}."
    )
    return text, (host, day, hour, room)


def _person(draw: random.Random) -> _Draft:
    name, job, city = draw.choice(_NAMES), draw.choice(_JOBS), draw.choice(_CITIES)
    colour, animal = draw.choice(_COLOURS), draw.choice(_ANIMALS)
    text = (
        f"Tell your neighbours in two sentences who {name} is. {name} is a {job} from {city} and "
        f"has a {colour} {animal}."
    )
    return text, (job, city, colour, animal)


def _advertisement(draw: random.Random) -> _Draft:
    thing, colour, city = draw.choice(_THINGS), draw.choice(_COLOURS), draw.choice(_CITIES)
    price = str(draw.randint(11, 97))
    text = (
        f"Write a short advertisement. The facts: a {colour} {thing} from {city}, the price is "
        f"{price} dollars."
    )
    return text, (colour, thing, city, price)


def _notice(draw: random.Random) -> _Draft:
    colour, animal = draw.choice(_COLOURS), draw.choice(_ANIMALS)
    city, day = draw.choice(_CITIES), draw.choice(_DAYS)
    text = f"Write a short notice for a newspaper. A {colour} {animal} was lost in {city} on {day}."
    return text, (colour, animal, city, day)


def _journey(draw: random.Random) -> _Draft:
    name, companion = draw.sample(_NAMES, 2)
    city, day, days = draw.choice(_CITIES), draw.choice(_DAYS), str(draw.randint(3, 19))
    text = (
        f"Describe this journey in two sentences. The facts: {name} travels to {city} with "
        f"{companion} on {day} and stays for {days} days."
    )
    return text, (city, companion, day, days)


def _sum(draw: random.Random) -> _Draft:
    name, fruit = draw.choice(_NAMES), draw.choice(_FRUITS)
    first, second = draw.sample(range(2, 10), 2)
    text = (
        f"{name} has {first} {fruit} and buys {second} more {fruit}. How many {fruit} does {name} "
        "have now? Answer in one full sentence."
    )
    return text, (name, str(first + second), fruit)


# Question number i is of kind i modulo their number.
KINDS: tuple[Callable[[random.Random], _Draft], ...] = (
    _message,
    _person,
    _advertisement,
    _notice,
    _journey,
    _sum,
)


def make_questions(name: str, count: int) -> Iterator[Question]:
    """Make the first ``count`` questions of the set ``name``."""
    for number in range(count):
        draw = random.Random(f"pilotfish facts {name} {number}")
        text, facts = KINDS[number % len(KINDS)](draw)
        yield Question(f"{name}-{number + 1}", text, ", ".join(facts))
