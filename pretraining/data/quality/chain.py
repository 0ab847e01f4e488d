"""The filters of a recipe, applied to texts in turn, and the JSON schema of `data.filters`."""

from collections.abc import Sequence

from pretraining.data.quality.content import Blocklist, Custom, Language, PersonalData
from pretraining.data.quality.heuristics import (
    C4,
    Alphabetic,
    FineWeb,
    GopherQuality,
    GopherRepetition,
    Length,
)
from pretraining.data.quality.report import FilterReport
from pretraining.data.quality.rule import Changed, Rejection, Rule
from pretraining.data.quality.text import TextView
from pretraining.errors import UserError
from pretraining.schema import check, problem

_CLASSES = (
    Length,
    Alphabetic,
    Language,
    GopherQuality,
    GopherRepetition,
    C4,
    FineWeb,
    Blocklist,
    PersonalData,
    Custom,
)

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in _CLASSES}
"""Every rule that a recipe may name; a new one is added to `_CLASSES`."""


class FilterChain:
    """Rules in the recipe's order. A verdict depends on the text alone: not on batches, workers, or earlier texts.

    `report` counts everything this chain has seen.
    """

    def __init__(self, rules: Sequence[Rule]):
        self.rules = tuple(rules)
        self.report = FilterReport.for_rules([rule.name for rule in self.rules])

    @classmethod
    def of(cls, specs: list[dict], where: str = "", key: str = "data.filters") -> "FilterChain":
        """Build the chain of a recipe's `data.filters`.

        Raises:
            UserError: `where`, `key` and number of an entry that names no rule, an unknown parameter, a value
                that does not fit, a file that cannot be read, a function that cannot be imported, or needs a
                package that is not installed.
        """
        entries = check(specs, filters_schema(), where, key)
        rules = []
        for number, entry in enumerate(entries):
            try:
                rules.append(RULES[entry["rule"]].of(entry))
            except UserError as error:
                # With the number of the entry, because a recipe may name a rule twice.
                raise problem(where, f"{key}.{number}.{entry['rule']}", str(error)) from error
        return cls(rules)

    @property
    def identity(self) -> list[dict]:
        """What the verdicts depend on: parameters and checksums of files. It is part of the key of a preparation."""
        return [rule.identity() for rule in self.rules]

    def apply(self, texts: Sequence[str], wheres: Sequence[str]) -> list[str | None]:
        """Return each text as the rules leave it, or None if one rejects it.

        Args:
            texts: in the order in which examples are to be reported.
            wheres: where each text comes from.
        """
        return [self._apply(text, where) for text, where in zip(texts, wheres, strict=True)]

    def _apply(self, text: str, where: str) -> str | None:
        self.report.count_read(text)
        view = TextView(text)
        for number, rule in enumerate(self.rules):
            try:
                verdict = rule.judge(view)
            except UserError as error:
                # The rule knows only the text: the place of the document is added here.
                raise UserError(f"{where}: filter {rule.name}: {error}") from error
            if isinstance(verdict, Changed):
                self.report.count_changed(number, verdict.counts)
                view = TextView(verdict.text)  # later rules see the text as this one left it
                # A rule may mask or remove all of a text: then nothing is left to train on.
                verdict = None if verdict.text else Rejection("nothing_left", 0, "a text")
            if verdict is not None:
                # If nothing is left, the example shows the text as it was read.
                self.report.count_rejected(number, verdict, view.text or text, text, where)
                return None
        self.report.count_kept(view.text)
        return view.text


def filters_schema() -> dict:
    """Return the JSON schema of `data.filters`, in the part of the language that `pretraining.schema` reads."""
    return {
        "type": "array",
        "default": [],
        "description": "What a text must be to be trained on: rules in this order, the first that rejects wins.",
        "items": {
            "type": "object",
            "properties": {"rule": {"enum": list(RULES), "description": "Which rule."}},
            "required": ["rule"],
            "allOf": [
                {"if": {"properties": {"rule": {"const": name}}}, "then": {"type": "object", **rule.schema()}}
                for name, rule in RULES.items()
            ],
        },
    }
