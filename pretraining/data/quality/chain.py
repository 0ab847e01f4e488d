"""The filters of a recipe, applied to texts in turn, what they took out, and the JSON schema of `data.filters`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from itertools import compress
from typing import TYPE_CHECKING, Any

from pretraining.data.quality import content, heuristics
from pretraining.data.quality.rule import Changed, Rejection, Rule
from pretraining.errors import UserError
from pretraining.outside.schema import check, problem

if TYPE_CHECKING:
    from pretraining.data.quality.text import TextView

_FORMS = (heuristics.GopherQuality, heuristics.GopherRepetition, heuristics.C4, heuristics.FineWeb)
_CONTENTS = (content.Quality, content.Blocklist, content.PersonalData, content.Custom)
_FIRST = (heuristics.Length, heuristics.Alphabetic, content.Language)
RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (*_FIRST, *_FORMS, *_CONTENTS)}
"""Every rule that a recipe may name."""


class FilterChain:
    """Rules in the recipe's order, and the `report` of all they have seen. A verdict depends on the text alone."""

    def __init__(self, specs: list[dict], where: str = ""):
        """Build the chain of a recipe's `data.filters`.

        Raises UserError (`where`, key and number of the entry) for one that names no rule, an unknown parameter, a
        value that does not fit, a file that cannot be read, a function that cannot be imported, or a package that
        is not installed.
        """
        self.rules: list[Rule] = []
        for number, entry in enumerate(check(specs, filters_schema(), where, "data.filters")):
            try:
                self.rules.append(RULES[entry["rule"]].of(entry))
            except UserError as error:
                # With the number of the entry, because a recipe may name a rule twice.
                raise problem(where, f"data.filters.{number}.{entry['rule']}", str(error)) from error
        names = [rule.name for rule in self.rules]
        # A rule that the recipe names again is numbered: blocklist, blocklist 2.
        numbers = [names[: position + 1].count(name) for position, name in enumerate(names)]
        titles = [name if n == 1 else f"{name} {n}" for name, n in zip(names, numbers, strict=True)]
        self.report = FilterReport([{"name": title, "rejected": {}, "changed": {}} for title in titles])

    @property
    def identity(self) -> list[dict]:
        """What the verdicts depend on: parameters and checksums of files. It is part of the key of a preparation."""
        return [rule.identity() for rule in self.rules]

    def apply(self, texts: Sequence[str], wheres: Sequence[str], source: str = "") -> list[str | None]:
        """Return each text as the rules leave it, or None if one rejects it.

        wheres: where each comes from. source: the name of their source, which rules may be for.
        """
        # Imported here, so that a check of a recipe does not wait for numpy.
        from pretraining.data.quality.text import TextView

        judging = [rule.sources is None or source in rule.sources for rule in self.rules]
        rules = [*compress(enumerate(self.rules), judging)]
        return [self._apply(rules, TextView(text), where) for text, where in zip(texts, wheres, strict=True)]

    def _apply(self, rules: list[tuple[int, Rule]], view: "TextView", where: str) -> str | None:
        report, text = self.report, view.text
        report.documents += 1
        report.num_bytes += _num_bytes(text)
        for number, rule in rules:
            try:
                verdict = rule.judge(view)
            except UserError as error:
                # The rule knows only the text: the place of the document is added here.
                raise UserError(f"{where}: filter {rule.name}: {error}") from error
            if isinstance(verdict, Changed):
                for kind, times in verdict.counts.items():
                    report.add(number, "changed", kind, documents=1, times=times)
                view = type(view)(verdict.text)  # later rules see the text as this one left it
                # A rule may mask or remove all of a text: then nothing is left to train on.
                verdict = None if verdict.text else Rejection("nothing_left", 0, "a text")
            if verdict is not None:
                # If nothing is left, the example shows the text as it was read.
                excerpt = (view.text or text)[verdict.position : verdict.position + EXAMPLE_CHARACTERS]
                example = {
                    "where": where,
                    "text": excerpt,
                    "measured": verdict.measured,
                    "wanted": verdict.wanted,
                }
                counts = {"documents": 1, "num_bytes": _num_bytes(text), "examples": [example]}
                report.add(number, "rejected", verdict.cause, **counts)
                return None
        report.kept_documents += 1
        report.kept_bytes += _num_bytes(view.text)
        return view.text


def filters_schema(described: bool = False) -> dict:
    """Return the JSON schema of `data.filters`, in the part of the language that `pretraining.outside.schema` reads."""
    rules = {name: rule.schema(described) for name, rule in RULES.items()}
    return {
        "type": "array",
        "default": [],
        "description": "What a text must be to be trained on: rules in this order, the first that rejects wins.",
        "items": {
            "type": "object",
            "properties": {"rule": {"enum": list(RULES), "description": "Which rule."}},
            "required": ["rule"],
            "allOf": [
                {"if": {"properties": {"rule": {"const": name}}}, "then": {"type": "object", **rule}}
                for name, rule in rules.items()
            ],
        },
    }


# What the filters took out and why: counts and examples by rule and cause.

NUM_EXAMPLES = 3
EXAMPLE_CHARACTERS = 200


def added(one: dict, other: dict, most_examples: int) -> dict:
    """Add two reports of one form: numbers are summed, objects key by key, the rules of a chain in pairs.

    `other` is about the texts behind those of `one`: the earliest examples stay, as one worker would have kept them.
    """

    def both(key: str) -> Any:
        first, second = one[key], other[key]
        if isinstance(first, dict):
            return added(first, second, most_examples)
        if key == "rules":
            return [added(*pair, most_examples) for pair in zip(first, second, strict=True)]
        if key == "examples":
            return [*first, *second][:most_examples]
        return first if isinstance(first, str) else first + second

    return {**one, **other, **{key: both(key) for key in one if key in other}}


@dataclass
class FilterReport:
    """The counts of a filter chain. Plain data: pickles, and survives `to_dict`."""

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

    def add(self, rule: int, outcome: str, cause: str, **counts: Any) -> None:
        """Add counts, and examples up to `NUM_EXAMPLES`, to an entry of a rule: "rejected" or "changed"."""
        entries = self.rules[rule][outcome]
        entries[cause] = added(entries.get(cause, {}), counts, NUM_EXAMPLES)

    @classmethod
    def merged(cls, reports: Sequence["FilterReport"]) -> "FilterReport":
        """Merge reports over the same rules, given in document order: equal to the report of one worker."""
        return cls(**reduce(partial(added, most_examples=NUM_EXAMPLES), map(asdict, reports)))

    def to_dict(self) -> dict:
        """Return nested JSON values; causes in alphabetical order."""
        values = asdict(self)
        # Causes are met in another order by other workers; the manifest must not show it.
        for rule in values["rules"]:
            rule |= {outcome: dict(sorted(rule[outcome].items())) for outcome in ("rejected", "changed")}
        return values

    def as_text(self) -> str:
        """Format what each rule and cause removed, most documents first."""
        rows = [("read", self.documents, self.num_bytes)]
        for rule in self.rules:
            # By name if counts are equal, so that the table is always the same.
            causes = sorted(rule["rejected"].items(), key=lambda item: (-item[1]["documents"], item[0]))
            for cause, each in causes:
                rows.append((f"{rule['name']}: {cause}", each["documents"], each["num_bytes"]))
        rows.append(("kept", self.kept_documents, self.kept_bytes))
        width = max(len(title) for title, *_ in rows)
        lines = [f"{'':{width}}  {'documents':>13}  {'share':>7}  {'text':>10}  {'share':>7}"]
        for title, documents, num_bytes in rows:
            # A corpus may be empty.
            shares = documents / max(self.documents, 1), num_bytes / max(self.num_bytes, 1)
            size = f"{num_bytes / 1e6:,.2f} MB"
            lines.append(f"{title:{width}}  {documents:13,}  {shares[0]:7.2%}  {size:>10}  {shares[1]:7.2%}")
        for rule in self.rules:
            for kind, change in sorted(rule["changed"].items()):
                counts = f"{change['times']:,} times in {change['documents']:,} documents"
                lines.append(f"{rule['name']} changed: {kind}, {counts}")
        return "\n".join(lines)


def _num_bytes(text: str) -> int:
    # An ASCII text has a byte a character: no need to encode it.
    # "surrogatepass": a JSON escape can leave half of a surrogate pair, which strict UTF-8 refuses.
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
