"""What the doctor found: one line each, with a verdict and what to do about it."""

import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field

from pretraining.errors import UserError

FINE, COSTS, BREAKS = "fine", "costs you", "will break"
VERDICTS = (FINE, COSTS, BREAKS)
"""From best to worst."""
LINE_WIDTH = 118


@dataclass(frozen=True)
class Finding:
    """One check of one machine, rank or pair of ranks."""

    check: str
    """What was looked at, in the field's words: "driver", "shared memory", "all-reduce"."""
    verdict: str
    """One of VERDICTS."""
    message: str
    """What was found, numbers with their units."""
    remedy: str = ""
    """What to do; empty if all is fine."""
    where: str = ""
    """Host, rank, file or pair of ranks; empty if it is about the whole run."""
    values: dict = field(default_factory=dict)
    """The measured numbers for `--json`, names with units: {"bytes_per_second": 1.2e9}."""

    @classmethod
    def of_error(cls, check: str, error: UserError, verdict: str = BREAKS) -> "Finding":
        """The line of an error, which says what is wrong and, after the first semicolon, what to do."""
        what, _, remedy = str(error).partition("; ")
        return cls(check, verdict, what, remedy)

    def to_dict(self) -> dict:
        """Plain JSON values."""
        return asdict(self)


def worst(findings: list[Finding]) -> str:
    """The worst verdict of all; FINE if there are none."""
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default=FINE)


def summary(findings: list[Finding], seconds: float) -> dict:
    """{"verdict", "will_break", "costs_you", "fine", "seconds"}: the worst verdict, and how many checks had each."""
    number = Counter(finding.verdict for finding in findings)
    counts = {"will_break": number[BREAKS], "costs_you": number[COSTS], "fine": number[FINE]}
    return {"verdict": worst(findings), **counts, "seconds": round(seconds, 2)}


def summary_line(found: dict) -> str:
    """The last line: whether a run will break here, and how many checks say so."""
    broken, costs, fine = found["will_break"], found["costs_you"], found["fine"]
    what = f"{broken} will break a run here" if broken else "nothing will break"
    return f"{what}; {costs} cost you; {fine} fine ({found['seconds']:.1f} s)"


def as_lines(findings: list[Finding]) -> str:
    """The findings as a table for people, in the order of the checks, the remedy beneath each line that has one."""
    width = max((len(finding.check) for finding in findings), default=0)
    margin = 10 + 2 + width + 2
    lines = []
    for finding in findings:
        place = f" ({finding.where})" if finding.where else ""
        first, *others = _wrapped(f"{finding.message}{place}", LINE_WIDTH - margin)
        lines.append(f"{finding.verdict:<10}  {finding.check:<{width}}  {first}")
        others += [
            ("   " if number else "-> ") + part
            for number, part in enumerate(_wrapped(finding.remedy, LINE_WIDTH - margin - 3))
            if finding.remedy
        ]
        lines += [" " * margin + other for other in others]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False) or [""]
