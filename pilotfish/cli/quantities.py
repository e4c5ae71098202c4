"""Parse times, rates, sizes and shares that have a unit after the number (argparse types)."""

import argparse
import re
from collections.abc import Mapping

_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_SPAN_S = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_NUMBER = r"\d{1,15}(?:\.\d{1,15})?|\.\d{1,15}"


def duration(text: str) -> float:
    """Parse ``50ms``, ``0.05s``, ``200us`` or ``0`` as seconds, 0 or more."""
    if text.strip() == "0":
        return 0.0
    return _with_unit(text, _SECONDS, "a time; write it as 50ms, 0.05s or 200us")


def span(text: str) -> float:
    """Parse ``90s``, ``5min``, ``24h`` or ``31d`` as seconds above 0."""
    seconds = _with_unit(text, _SPAN_S, "a time; write it as 90s, 5min, 24h or 31d")
    if seconds == 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time at all; give a time above 0")
    return seconds


def size(text: str) -> int:
    """Parse ``200MB``, ``1.5GB`` or ``0`` as bytes. Units are powers of 1000."""
    if text.strip() == "0":
        return 0
    return round(_with_unit(text, _BYTES, "a size; write it as 500kB, 200MB or 1GB"))


def rate(text: str) -> float:
    """Parse ``20mbit``, ``1.5gbit`` or ``800kbit`` as bit/s above 0. Units are powers of 1000."""
    value = _with_unit(text, _BITS_PER_S, "a rate; write it as 20mbit, 1.5gbit or 800kbit")
    if value == 0.0:
        raise argparse.ArgumentTypeError(
            f"a link of rate {text!r} carries nothing; give a rate above 0"
        )
    return value


def share(text: str) -> float:
    """Parse ``1%`` or ``0.01`` as a share, 0 or more and below 1."""
    match = re.fullmatch(rf"({_NUMBER})\s*(%?)", text.strip(), re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; write it as 1% or 0.01")
    value = float(match[1]) / (100.0 if match[2] else 1.0)
    if value >= 1.0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is 100% or more; write a share below 100%, as 1% or 0.01"
        )
    return value


def _with_unit(text: str, units: Mapping[str, float], what: str) -> float:
    match = re.fullmatch(rf"({_NUMBER})\s*([a-zµ]+)", text.strip().lower())
    if match is None or match[2] not in units or not match[1].isascii():
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return float(match[1]) * units[match[2]]
