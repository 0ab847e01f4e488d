"""Hold what the doctor found: one line each, with a verdict and what to do about it."""

import re
import textwrap
from collections import Counter
from dataclasses import dataclass, field, replace

from pretraining.errors import UserError

FINE, COSTS, BREAKS = "fine", "costs you", "will break"
VERDICTS = (FINE, COSTS, BREAKS)
"""From best to worst."""
LINE_WIDTH = 118
MOST_NAMED = 4
"""The most ranks or nodes that one line names."""
# with its unit: 980 MB on one node and 1.2 GB on another are the same line
_NUMBER = re.compile(r"\d[\d.,]*( [kMGT]?B\b)?")


@dataclass(frozen=True)
class Finding:
    """One check of one machine, rank or pair of ranks."""

    check: str
    """What was looked at, in the field's words: "driver", "shared memory", "all-reduce"."""
    verdict: str
    message: str
    """What was found, numbers with their units."""
    remedy: str = ""
    """What to do; empty if all is fine."""
    where: str = ""
    """Host, rank, file or pair of ranks; empty if it is about the whole run."""
    values: dict = field(default_factory=dict)
    """The measured numbers for `--json`, names with units: {"bytes_per_second": 1.2e9}."""

    @classmethod
    def of_error(
        cls, check: str, error: UserError | str, verdict: str = BREAKS, where: str = ""
    ) -> "Finding":
        """Make a finding of an error, which says what is wrong and, after the first semicolon, what to do."""
        what, _, remedy = str(error).partition("; ")
        return cls(check, verdict, what, remedy, where)

    def on(self, place: str) -> "Finding":
        """Return the same finding with one or several nodes as its place."""
        return replace(self, where=f"{self.where} on {place}" if self.where else place)


def worst(findings: list[Finding]) -> str:
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default=FINE)


def of_all_nodes(hosts: list[str], found: list[list[Finding]]) -> list[Finding]:
    """Merge the lines of all nodes, so that each is there once; a line that not every node has names its nodes.

    Lines that differ only in numbers, or in the node's own name, count as one; the first node's is shown.
    hosts: the name of each node, rank 0's first. found: what each node found about itself.
    """
    lines: dict[tuple, dict[int, Finding]] = {}
    for node, (host, findings) in enumerate(zip(hosts, found, strict=True)):
        repeated: Counter = Counter()
        for finding in findings:
            words = finding.check, finding.verdict, _NUMBER.sub("#", finding.message.replace(host, "HOST"))
            # counted: two such lines of one node (two disks) stay two
            lines.setdefault((*words, repeated[words]), {})[node] = finding
            repeated[words] += 1
    merged = []
    for by_node in lines.values():
        names, first = [hosts[node] for node in by_node], next(iter(by_node.values()))
        on_all = len(names) == len(hosts)
        if on_all and len({(each.message, each.remedy, each.where) for each in by_node.values()}) == 1:
            merged.append(first)
        else:
            # of one that is fine everywhere, the node whose numbers are shown
            merged.append(first.on(few_of(names[:1] if on_all and first.verdict == FINE else names)))
    return merged


def few_of(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def summary(findings: list[Finding], seconds: float) -> dict:
    """Count the verdicts: {"verdict" (the worst), "will_break", "costs_you", "fine", "seconds"}."""
    number = Counter(finding.verdict for finding in findings)
    counts = {"will_break": number[BREAKS], "costs_you": number[COSTS], "fine": number[FINE]}
    return {"verdict": worst(findings), **counts, "seconds": round(seconds, 2)}


def summary_line(counts: dict) -> str:
    """Write the last line: whether a run will break here, and how many checks say so."""
    broken = counts["will_break"]
    what = f"{broken} will break a run here" if broken else "nothing will break"
    return f"{what}; {counts['costs_you']} cost you; {counts['fine']} fine ({counts['seconds']:.1f} s)"


def as_lines(findings: list[Finding]) -> str:
    """Write the findings as a table, in the order of the checks; a remedy follows below its line."""
    width = max((len(finding.check) for finding in findings), default=0)
    # 10: the longest verdict, "will break"; 2: the space between columns
    margin = 10 + 2 + width + 2
    whole_words = {"width": LINE_WIDTH, "break_on_hyphens": False, "break_long_words": False}
    lines = []
    for finding in findings:
        text = f"{finding.message} ({finding.where})" if finding.where else finding.message
        begin = f"{finding.verdict:<10}  {finding.check:<{width}}  "
        lines += textwrap.wrap(text, initial_indent=begin, subsequent_indent=" " * margin, **whole_words)
        indents = {"initial_indent": " " * margin + "-> ", "subsequent_indent": " " * margin + "   "}
        lines += textwrap.wrap(finding.remedy, **indents, **whole_words)
    return "\n".join(lines)
