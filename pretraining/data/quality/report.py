"""What the filters took out and why: counts and examples by rule and cause, as JSON and as a table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pretraining.data.quality.rule import Rejection

NUM_EXAMPLES = 3
EXAMPLE_CHARACTERS = 200


@dataclass
class FilterReport:
    """The counts of a filter chain. Plain data: pickles, and survives `to_dict` and `from_dict`."""

    rules: list[dict]
    """In the recipe's order: {name, rejected: {cause: {documents, num_bytes, examples}}, changed: {kind: {documents,
    times}}}. Bytes are those of the texts as they were read; examples are the first few: {where, text, measured,
    wanted}."""
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
        return cls([{"name": title, "rejected": {}, "changed": {}} for title in titles])

    def count_read(self, text: str) -> None:
        self.documents += 1
        self.num_bytes += _num_bytes(text)

    def count_kept(self, text: str) -> None:
        self.kept_documents += 1
        self.kept_bytes += _num_bytes(text)

    def count_changed(self, rule: int, counts: dict[str, int]) -> None:
        """Count the changes of a text: {kind: how often}."""
        for kind, times in counts.items():
            self._add_change(rule, kind, 1, times)

    def count_rejected(self, rule: int, why: Rejection, seen: str, read: str, where: str) -> None:
        """Count a text that a rule rejected: `seen` is the text after the earlier rules, `read` is the original."""
        entry = self._add_rejected(rule, why.cause, 1, _num_bytes(read))
        if len(entry["examples"]) < NUM_EXAMPLES:
            excerpt = seen[why.position : why.position + EXAMPLE_CHARACTERS]
            example = {"where": where, "text": excerpt, "measured": why.measured, "wanted": why.wanted}
            entry["examples"].append(example)

    def _add_change(self, rule: int, kind: str, documents: int, times: int) -> None:
        change = self.rules[rule]["changed"].setdefault(kind, {"documents": 0, "times": 0})
        change["documents"] += documents
        change["times"] += times

    def _add_rejected(self, rule: int, cause: str, documents: int, num_bytes: int) -> dict:
        nothing: dict = {"documents": 0, "num_bytes": 0, "examples": []}
        entry = self.rules[rule]["rejected"].setdefault(cause, nothing)
        entry["documents"] += documents
        entry["num_bytes"] += num_bytes
        return entry

    @classmethod
    def merged(cls, reports: Sequence["FilterReport"]) -> "FilterReport":
        """Merge reports over the same rules, given in document order: equal to the report of one worker."""
        total = cls([{"name": rule["name"], "rejected": {}, "changed": {}} for rule in reports[0].rules])
        for report in reports:
            for key in ("documents", "num_bytes", "kept_documents", "kept_bytes"):
                setattr(total, key, getattr(total, key) + getattr(report, key))
            for number, rule in enumerate(report.rules):
                for cause, entry in rule["rejected"].items():
                    sum_of = total._add_rejected(number, cause, entry["documents"], entry["num_bytes"])
                    # The earliest examples stay, as one worker would have kept them.
                    sum_of["examples"] = [*sum_of["examples"], *entry["examples"]][:NUM_EXAMPLES]
                for kind, change in rule["changed"].items():
                    total._add_change(number, kind, **change)
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
        return cls(**values)

    def as_text(self, examples: bool = False) -> str:
        """Format what each rule and cause removed, most documents first; if `examples`, show examples below."""
        rows = [("read", self.documents, self.num_bytes)]
        rejections = [
            (f"{rule['name']}: {cause}", entry)
            for rule in self.rules
            # By name if counts are equal, so that the table is always the same.
            for cause, entry in sorted(
                rule["rejected"].items(), key=lambda item: (-item[1]["documents"], item[0])
            )
        ]
        rows += [(title, entry["documents"], entry["num_bytes"]) for title, entry in rejections]
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
                f"{rule['name']} changed: {kind}, {change['times']:,} times in {change['documents']:,} documents"
                for kind, change in sorted(rule["changed"].items())
            ]
        for title, entry in rejections if examples else ():
            lines += ["", title]
            for example in entry["examples"]:
                lines.append(f"  {example['where']}: {example['measured']}, wanted {example['wanted']}")
                # One line for each example, whatever its line breaks.
                lines.append(f"    {' '.join(example['text'].split())}")
        return "\n".join(lines)


def _num_bytes(text: str) -> int:
    # An ASCII text has a byte a character: no need to encode it.
    # "surrogatepass": a JSON escape can leave half of a surrogate pair, which strict UTF-8 refuses.
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
