"""Numbers as people write and read them: `7b` parameters, `1.4T` tokens, `3.2 days`, `6.1e+23`."""

import argparse
import math
import re

SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "q": 1e15}
LARGEST = 1e33
MOST_GPUS = 10_000_000


def amount(text: str) -> float:
    """Read a positive number with an optional suffix k, m, b, g, t or q: "300e9", "300b" and "0.3T" are the same.

    `ArgumentTypeError` if it is not a number, not positive, or beyond 1e33.
    """
    digits, scale = text, 1.0
    if digits[-1:].lower() in SUFFIXES:
        digits, scale = digits[:-1], SUFFIXES[digits[-1].lower()]
    # Thousands may be separated, as in 1,000 or 1_000. A comma that stands elsewhere may mean a decimal one.
    if re.fullmatch(r"\d{1,3}([,_]\d{3})+(\.\d*)?", digits):
        digits = digits.replace(",", "")
    try:
        number = float(digits) * scale
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write 7e9 or 7b") from None
    if not 0 < number <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number below {LARGEST:g}")
    return number


def count(text: str) -> float:
    """Read a number of at least 1, as `amount` does: parameters, tokens, FLOPs, bytes."""
    number = amount(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return number


def gpu_count(text: str) -> int:
    """Read a whole number of GPUs from 1 to ten million."""
    number = amount(text)
    # "2.5k" is a whole number, "2.5" is not
    if number != int(number) or number > MOST_GPUS:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to {MOST_GPUS:,}")
    return int(number)


def share(text: str) -> float:
    """Read a number in (0, 1], such as an MFU."""
    number = amount(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0 and at most 1; for 40 % write 0.4")
    return number


def short(number: float) -> str:
    """Write three digits and a suffix: 1.50T, 67.0B, 124M."""
    for suffix, scale in (("Q", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{three_digits(number / scale)}{suffix}"
    return three_digits(number)


def several(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def three_digits(number: float) -> str:
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    if number >= 1e6 or number < 1e-4:
        return f"{number:.2e}"
    return f"{number:,.{max(0, 2 - math.floor(math.log10(number)))}f}"


def duration(seconds: float) -> str:
    """Write seconds in the unit that a person would use."""
    # from two of a unit on: 1.5 days are written as 36 hours
    for unit, length in (("years", 365 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{three_digits(seconds / length)} {unit}"
    return f"{three_digits(seconds)} s" if seconds >= 1 else f"{three_digits(1000 * seconds)} ms"


def dollars(amount_: float) -> str:
    """Write dollars, without cents from 100 on, and with three digits below a cent."""
    if 0 < amount_ < 0.01:
        return f"${three_digits(amount_)}"
    return f"${amount_:,.0f}" if amount_ >= 100 else f"${amount_:,.2f}"


def hours(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 or number == 0 else three_digits(number)


def energy(kilowatt_hours: float) -> str:
    large = kilowatt_hours >= 1000
    return f"{three_digits(kilowatt_hours / 1000)} MWh" if large else f"{three_digits(kilowatt_hours)} kWh"


def num_bytes(number: float) -> str:
    """Write bytes in decimal units, as disks and networks are sold."""
    for suffix, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{three_digits(number / scale)} {suffix}"
    return f"{number:.0f} B"


def recomputation_text(every_n_layers: int, recompute: str = "layers") -> str:
    """Write how many layers are recomputed: one in `every_n_layers`; 0: none. recompute: `speed.recompute`."""
    if not every_n_layers:
        return "nothing recomputed"
    layers = f"one layer in {every_n_layers}" if every_n_layers > 1 else "every layer"
    return f"{layers} recomputed" + (", but for products and attention" if recompute == "operators" else "")
