"""What every filter rule shares: its verdict on a text, and its parameters, each stated once.

A parameter's field carries type, default, limits and description. The recipe's JSON schema, the check of an entry
and the identity of a preparation all follow from it.
"""

import types
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from pretraining.data.quality.text import TextView

_JSON_TYPES = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    types.NoneType: "null",
    dict: "object",
}


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
    """Reject if there is a minimum and `measured` is below it."""
    if minimum is None or measured >= minimum:
        return None
    return Rejection(cause, _rounded(measured), f"at least {minimum:g}")


def above(cause: str, measured: float, maximum: float | None) -> Rejection | None:
    """Reject if there is a maximum and `measured` is above it."""
    if maximum is None or measured <= maximum:
        return None
    return Rejection(cause, _rounded(measured), f"at most {maximum:g}")


def _rounded(value: float) -> float | int:
    # Counts stay integers in the JSON report; shares keep four digits.
    return int(value) if float(value).is_integer() else float(f"{value:.4g}")


def parameter(default: Any, description: str, **schema: Any) -> Any:
    """Make a dataclass field that is also a key of the recipe; `schema` adds to what its annotation says.

    A default of `...` makes the key required.
    """
    metadata = {"description": description, **schema}
    if default is ...:
        return field(metadata=metadata)
    if isinstance(default, list | dict):
        # A copy for each rule: dataclasses refuse a mutable default.
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def from_one_to(default: float | None, description: str) -> Any:
    """Make a parameter that is a share of a whole, or null for no limit."""
    return parameter(default, f"{description}; null: no limit.", minimum=0, maximum=1)


@dataclass(frozen=True)
class Rule:
    """One entry of `data.filters`. Its fields are the entry's keys, its docstring's first line describes it."""

    name: ClassVar[str]
    together: ClassVar[dict] = {}
    """What its keys ask of each other, in the words of `pretraining.schema`."""

    def judge(self, view: "TextView") -> Rejection | Changed | None:
        """Reject the text, change it, or return None to keep it as it is. A function of the text alone."""
        raise NotImplementedError

    def identity(self) -> dict:
        """Return all that a verdict depends on besides the text: parameters, contents of files, models."""
        values = asdict(self)
        return {"rule": self.name, **{_key_of(entry): values[entry.name] for entry in fields(self)}}

    @classmethod
    def of(cls, entry: dict) -> Self:
        """Build the rule of a checked entry; keys left out have their default. UserError if values do not fit."""
        return cls(**{item.name: entry[_key_of(item)] for item in fields(cls) if _key_of(item) in entry})

    @classmethod
    def schema(cls) -> dict:
        """Return the JSON schema of this rule's entry in the recipe."""
        hints = get_type_hints(cls)
        # Editors show the first line of the docstring.
        properties = {"rule": {"const": cls.name, "description": (cls.__doc__ or "").partition("\n")[0]}}
        for entry in fields(cls):
            value = {**_type_schema(hints[entry.name]), **entry.metadata}
            if entry.default_factory is not MISSING:
                value["default"] = entry.default_factory()
            elif entry.default is not MISSING:
                value["default"] = entry.default
            properties[_key_of(entry)] = value
        required = [name for name, value in properties.items() if name != "rule" and "default" not in value]
        # Without further keys, so that a misspelt parameter is an error.
        schema = {"properties": properties, **cls.together, "additionalProperties": False}
        return {**schema, "required": required} if required else schema


def _key_of(entry: Field) -> str:
    """Return the recipe's key: the field's name, without the underscore that avoids a Python keyword (`import_`)."""
    return entry.name.rstrip("_")


def _type_schema(hint: Any) -> dict:
    """Translate an annotation: `int | None` to {"type": ["integer", "null"]}, `list[str]` to an array of strings."""
    if get_origin(hint) is list:
        return {"type": "array", "items": _type_schema(get_args(hint)[0])}
    if isinstance(hint, types.UnionType):
        parts = [_type_schema(part) for part in get_args(hint)]
        merged = {key: value for part in parts for key, value in part.items()}
        # The list of types replaces the "type" that `merged` has from the last part.
        return {**merged, "type": [part["type"] for part in parts]}
    return {"type": _JSON_TYPES[get_origin(hint) or hint]}
