"""What every filter rule shares: its verdict on a text, and its parameters, which are those of a recipe's section.

The recipe's JSON schema, the check of an entry and the identity of a preparation follow from a parameter's field.
"""

from collections.abc import Mapping
from keyword import iskeyword
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from pretraining.recipe.section import Section, key

if TYPE_CHECKING:
    from pretraining.data.quality.text import TextView


class Rejection(NamedTuple):
    """The text is left out: the rule wants `wanted` (such as "at least 50") and found `measured`."""

    cause: str
    measured: float | int | str
    wanted: str
    position: int = 0
    """First character of the excerpt that the report shows."""


class Changed(NamedTuple):
    """The text is kept, changed; `counts` says how often each kind of change was made in it."""

    text: str
    counts: dict[str, int]


def below(cause: str, measured: float, minimum: float | None) -> Rejection | None:
    if minimum is None or measured >= minimum:
        return None
    return Rejection(cause, _rounded(measured), f"at least {minimum:g}")


def above(cause: str, measured: float, maximum: float | None) -> Rejection | None:
    if maximum is None or measured <= maximum:
        return None
    return Rejection(cause, _rounded(measured), f"at most {maximum:g}")


def _rounded(value: float) -> float | int:
    # Counts stay integers in the JSON report; shares keep four digits.
    return int(value) if float(value).is_integer() else float(f"{value:.4g}")


class Rule(Section):
    """One entry of `data.filters`. Its fields are the entry's keys, its docstring's first line describes it."""

    name: ClassVar[str]
    together: ClassVar[dict] = {}
    """What its keys ask of each other, in the words of `pretraining.outside.schema`."""
    sources: list[str] | None = key(default=None, minItems=1, omitted=True)
    """Names of the sources whose texts it judges; left out: all."""

    def judge(self, view: "TextView") -> Rejection | Changed | None:
        """Reject the text, change it, or return None to keep it as it is. A function of the text alone."""
        raise NotImplementedError

    def identity(self) -> dict:
        """Return all that a verdict depends on besides the text: parameters, contents of files, models."""
        return {"rule": self.name, **_as_keys(self.to_dict())}

    @classmethod
    def of(cls, values: Mapping) -> Self:
        """Build the rule of a checked entry; keys left out have their default. UserError if values do not fit."""
        given = {name: value for name, value in values.items() if name != "rule"}
        return super().of({f"{name}_" if iskeyword(name) else name: value for name, value in given.items()})

    @classmethod
    def schema(cls, described: bool = False) -> dict:
        """Return the JSON schema of this rule's entry in the recipe."""
        whole = super().schema(described)
        # Editors show the first line of the docstring.
        rule = {"const": cls.name, "description": (cls.__doc__ or "").partition("\n")[0]}
        schema = {"properties": {"rule": rule, **_as_keys(whole["properties"])}, **cls.together}
        required = [*_as_keys(dict.fromkeys(whole.get("required", ())))]
        return {**schema, "additionalProperties": False, **({"required": required} if required else {})}


def _as_keys(values: dict) -> dict:
    """Name values by the recipe's keys: without the underscore that avoids a Python keyword (`import_`)."""
    return {name.rstrip("_"): value for name, value in values.items()}
