"""What the doctor found: one line each, with a verdict and what to do about it."""

from dataclasses import asdict, dataclass, field

FINE, COSTS, BREAKS = "fine", "costs you", "will break"
VERDICTS = (FINE, COSTS, BREAKS)
"""From best to worst."""


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

    def to_dict(self) -> dict:
        """Plain JSON values."""
        return asdict(self)


def worst(findings: list[Finding]) -> str:
    """The worst verdict of all; FINE if there are none."""
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default=FINE)


def as_lines(findings: list[Finding]) -> str:
    """The findings as a table for people, in the order of the checks, the remedy beneath each line that has one."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        place = f" ({finding.where})" if finding.where else ""
        lines.append(f"{finding.verdict:<10}  {finding.check:<{width}}  {finding.message}{place}")
        if finding.remedy:
            lines.append(f"{'':<{width + 14}}-> {finding.remedy}")
    return "\n".join(lines)
