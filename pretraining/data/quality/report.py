"""What the filters took out and why: counts and examples by rule and cause, as JSON and as a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from pretraining.data.quality.rule import Rejection

NUM_EXAMPLES = 3
EXAMPLE_CHARACTERS = 200


@dataclass
class Rejected:
    """Counts of the texts that one cause of one rule took out, and the first few of them."""

    documents: int = 0
    num_bytes: int = 0
    """UTF-8 bytes of these texts, as they were read."""
    examples: list[dict] = field(default_factory=list)
    """{where, text, measured, wanted}, in the order in which the texts were read."""

    def add(self, other: "Rejected") -> None:
        self.documents += other.documents
        self.num_bytes += other.num_bytes
        # The earliest examples stay, as one worker would have kept them.
        self.examples = [*self.examples, *other.examples][:NUM_EXAMPLES]


@dataclass
class Change:
    """Counts of one kind of change: in how many texts it was made, and how often."""

    documents: int = 0
    times: int = 0

    def add(self, other: "Change") -> None:
        self.documents += other.documents
        self.times += other.times


@dataclass
class RuleReport:
    """One rule of the recipe: cause -> what it rejected, kind -> what it changed."""

    name: str
    rejected: dict[str, Rejected] = field(default_factory=dict)
    changed: dict[str, Change] = field(default_factory=dict)

    def add(self, other: "RuleReport") -> None:
        for cause, entry in other.rejected.items():
            self.rejected.setdefault(cause, Rejected()).add(entry)
        for kind, change in other.changed.items():
            self.changed.setdefault(kind, Change()).add(change)


@dataclass
class FilterReport:
    """The counts of a filter chain. Plain data: pickles, and survives `to_dict` and `from_dict`."""

    rules: list[RuleReport]
    """In the recipe's order."""
    documents: int = 0
    num_bytes: int = 0
    """UTF-8 bytes of the texts read."""
    kept_documents: int = 0
    kept_bytes: int = 0
    """UTF-8 bytes of the texts kept, as the rules left them."""

    @classmethod
    def for_rules(cls, names: Sequence[str]) -> "FilterReport":
        """Make an empty report. A rule that the recipe names again is numbered: blocklist, blocklist 2."""
        numbers = [list(names[: position + 1]).count(name) for position, name in enumerate(names)]
        titles = [name if n == 1 else f"{name} {n}" for name, n in zip(names, numbers, strict=True)]
        return cls([RuleReport(title) for title in titles])

    def count_read(self, text: str) -> None:
        self.documents += 1
        self.num_bytes += _num_bytes(text)

    def count_kept(self, text: str) -> None:
        self.kept_documents += 1
        self.kept_bytes += _num_bytes(text)

    def count_changed(self, rule: int, counts: dict[str, int]) -> None:
        changed = self.rules[rule].changed
        for kind, times in counts.items():
            changed.setdefault(kind, Change()).add(Change(1, times))

    def count_rejected(self, rule: int, why: Rejection, seen: str, read: str, where: str) -> None:
        """Count a text that a rule rejected: `seen` is the text after the earlier rules, `read` is the original."""
        entry = self.rules[rule].rejected.setdefault(why.cause, Rejected())
        entry.documents += 1
        entry.num_bytes += _num_bytes(read)
        if len(entry.examples) < NUM_EXAMPLES:
            excerpt = seen[why.position : why.position + EXAMPLE_CHARACTERS]
            example = {"where": where, "text": excerpt, "measured": why.measured, "wanted": why.wanted}
            entry.examples.append(example)

    @classmethod
    def merged(cls, reports: Sequence["FilterReport"]) -> "FilterReport":
        """Merge reports over the same rules, given in document order: equal to the report of one worker."""
        total = cls([RuleReport(rule.name) for rule in reports[0].rules])
        for report in reports:
            for key in ("documents", "num_bytes", "kept_documents", "kept_bytes"):
                setattr(total, key, getattr(total, key) + getattr(report, key))
            for mine, other in zip(total.rules, report.rules, strict=True):
                mine.add(other)
        return total

    def to_dict(self) -> dict:
        """Return nested JSON values; causes in alphabetical order."""
        values = asdict(self)
        for rule in values["rules"]:
            # Causes are met in another order by other workers; the manifest must not show it.
            rule["rejected"] = dict(sorted(rule["rejected"].items()))
            rule["changed"] = dict(sorted(rule["changed"].items()))
        return values

    @classmethod
    def from_dict(cls, values: dict) -> "FilterReport":
        rules = [
            RuleReport(
                rule["name"],
                {cause: Rejected(**entry) for cause, entry in rule["rejected"].items()},
                {kind: Change(**entry) for kind, entry in rule["changed"].items()},
            )
            for rule in values["rules"]
        ]
        return cls(**{**values, "rules": rules})

    def as_text(self, examples: bool = False) -> str:
        """Format what each rule and cause removed, most documents first; if `examples`, show examples below."""
        rows = [("read", self.documents, self.num_bytes)]
        rejections = [
            (f"{rule.name}: {cause}", entry)
            for rule in self.rules
            # By name if counts are equal, so that the table is always the same.
            for cause, entry in sorted(rule.rejected.items(), key=lambda item: (-item[1].documents, item[0]))
        ]
        rows += [(title, entry.documents, entry.num_bytes) for title, entry in rejections]
        rows.append(("kept", self.kept_documents, self.kept_bytes))
        width = max(len(title) for title, *_ in rows)
        lines = [f"{'':{width}}  {'documents':>13}  {'share':>7}  {'text':>10}  {'share':>7}"]
        for title, documents, num_bytes in rows:
            # A corpus may be empty.
            shares = documents / max(self.documents, 1), num_bytes / max(self.num_bytes, 1)
            size = f"{num_bytes / 1e6:,.2f} MB"
            lines.append(f"{title:{width}}  {documents:13,}  {shares[0]:7.2%}  {size:>10}  {shares[1]:7.2%}")
        for rule in self.rules:
            lines += [
                f"{rule.name} changed: {kind}, {change.times:,} times in {change.documents:,} documents"
                for kind, change in sorted(rule.changed.items())
            ]
        for title, entry in rejections if examples else ():
            lines += ["", title]
            for example in entry.examples:
                lines.append(f"  {example['where']}: {example['measured']}, wanted {example['wanted']}")
                # One line for each example, whatever its line breaks.
                lines.append(f"    {' '.join(example['text'].split())}")
        return "\n".join(lines)


def _num_bytes(text: str) -> int:
    # An ASCII text has a byte a character: no need to encode it.
    # "surrogatepass": a JSON escape can leave half of a surrogate pair, which strict UTF-8 refuses.
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
