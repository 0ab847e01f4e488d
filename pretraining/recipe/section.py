"""A section of the recipe is a class whose fields carry type, default, limits and description, once.

    class Report(Section):
        "What the page shows."
        every_seconds: float | None = key(default=30, minimum=0.1)
        "Write it at most this often."

`Report.schema()` is the section's JSON Schema, `Report.of(values)` builds it from checked JSON, `to_dict()` is what
recipe.json holds of it.
"""

import ast
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, Union, dataclass_transform, get_args, get_origin

from pretraining.outside.schema import Wrong
from pretraining.runtime.installation import REPOSITORY

RECIPES = REPOSITORY / "recipes"
JSON_TYPES = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    types.NoneType: "null",
    dict: "object",
}

LONGEST_NAME = 200
"""Bytes of a folder's name: file systems take 255, and the names beside it (`.replaced-N`, `.building`) are longer."""


def key(
    *,
    default: Any = MISSING,
    default_factory: Any = MISSING,
    omitted: bool = False,
    only_with: tuple[str, ...] = (),
    **limits: Any,
) -> Any:
    """A field of a section. The text beneath it is what editors and docs/recipe_keys.md say of it.

    Args:
        default: what the recipe means if it leaves the key out; without one the key is required.
        default_factory: the class of a section that is there, with its own defaults, if the recipe leaves it out.
        omitted: whether the key stays out of recipe.json, and of the schema's defaults, while it is None.
        only_with: fields beside it, or `field=value`, of which one must be set for the key to change anything.
        limits: of the value, in the words of JSON Schema (minimum, minLength, ...); `schema` takes the place of
            what the annotation says.
    """
    metadata = {"omitted": omitted, "only_with": only_with, "limits": limits}
    if isinstance(default, list | dict):  # one for each section, as dataclasses ask for
        kept, default = default, MISSING
        return field(default_factory=lambda: copy(kept), metadata=metadata)
    return field(default=default, default_factory=default_factory, metadata=metadata)


TEXT = {"type": "string", "minLength": 1}


def described(text: str, **schema: Any) -> dict:
    """Return the schema of a key that is no field of a section, in the words of JSON Schema, with its description."""
    return {**schema, "description": text}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(key, field))
class Section:
    """One object of a recipe. Its docstring's first paragraph describes it."""

    keeps_what_is_written: ClassVar[bool] = False
    """Whether recipe.json holds only the keys that the recipe itself gives, without defaults."""
    one_of: ClassVar[tuple[str, ...]] = ()
    """Keys of which exactly one must be given."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # it changes the class in place: subclasses need no decorator
        dataclass(frozen=True, kw_only=True)(cls)

    @classmethod
    def of(cls, values: Mapping) -> Self:
        """The section of a checked JSON object; what it leaves out has its default."""
        hints = {each.name: each.type for each in fields(cls)}
        section = cls(**{name: _built(hints.get(name), value) for name, value in values.items()})
        if cls.keeps_what_is_written:
            # the dataclass is frozen; the name is no field
            object.__setattr__(section, "_written", frozenset(values))
        return section

    def to_dict(self) -> dict:
        """The JSON object that `of` builds this section from."""
        written = getattr(self, "_written", None)
        values = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if not (value is None and each.metadata["omitted"]) and (written is None or each.name in written):
                values[each.name] = _plain(value)
        return values

    @classmethod
    def schema(cls, described: bool = False) -> dict:
        """described: with the texts beneath the fields, for which the source is read; checks do without."""
        texts: dict[str, str] = {}
        for each in reversed(cls.__mro__) if described else ():
            texts |= texts_beneath(each) if issubclass(each, Section) else {}
        properties = {each.name: _field_schema(each, texts, described) for each in fields(cls)}
        required = [each.name for each in fields(cls) if each.default is each.default_factory is MISSING]
        schema = {"type": "object", "description": description_of(cls), "properties": properties}
        if cls.one_of:
            schema["oneOf"] = [{"required": [name]} for name in cls.one_of]
        if required:
            schema["required"] = required
        return {**schema, "additionalProperties": False}

    def check(self, at: str) -> Wrong:
        """Yield what is wrong with the sections inside this one, then with this one. at: its dotted key."""
        for each in fields(self):
            value = getattr(self, each.name)
            place = f"{at}.{each.name}"
            inside = enumerate(value) if isinstance(value, list) else ()
            for where, section in [(place, value), *((f"{place}.{number}", part) for number, part in inside)]:
                if isinstance(section, Section):
                    yield from section.check(where)
        yield from self.check_together(at)

    def unread(self, at: str) -> Iterable[str]:
        """Yield a note for each value, here and in sections inside, that changes nothing for want of another key."""
        for each in fields(self):
            value, wanted = getattr(self, each.name), each.metadata["only_with"]
            if isinstance(value, Section):
                yield from value.unread(f"{at}.{each.name}")
            if wanted and value != _default_of(each) and not any(map(self._has, wanted)):
                yield f"{at}.{each.name}: does nothing without {' or '.join(f'{at}.{name}' for name in wanted)}"

    def _has(self, wanted: str) -> bool:
        name, _, needed = wanted.partition("=")
        value = getattr(self, name)
        return str(value) == needed if needed else value not in (None, 0, "", [], "none")

    def check_together(self, at: str) -> Iterable[tuple[str, str]]:
        """Yield what the schema cannot judge: a value, or fields that do not fit each other."""
        return ()


def description_of(section: type[Section]) -> str:
    """The first paragraph of the class's docstring, as one line."""
    return " ".join((section.__doc__ or "").partition("\n\n")[0].split())


def texts_beneath(kind: type) -> dict[str, str]:
    """Return {name: text beneath the field, as one line} of the fields that the class itself has."""
    whole, texts = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0], {}
    assert isinstance(whole, ast.ClassDef)
    for pair in pairwise(whole.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = " ".join(text.split())
    return texts


def _built(hint: Any, value: Any) -> Any:
    """Make a section, or a list of them, of the value of a key that has this type; any other value stays as it is."""
    if isinstance(value, list):
        return [_built(hint, item) for item in value]
    kinds = [hint, *get_args(hint), *(part for each in get_args(hint) for part in get_args(each))]
    for kind in kinds if isinstance(value, Mapping) else ():
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind.of(value)
    return value


def _plain(value: Any) -> Any:
    """A copy of a field's value that JSON can write and that shares nothing with the section."""
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in value.items()} if isinstance(value, dict) else value


def _field_schema(each: Field, texts: dict[str, str], described: bool) -> dict:
    limits = dict(each.metadata["limits"])
    schema = limits.pop("schema", None) or _type_schema(each.type, described)
    if each.metadata["omitted"] and "enum" in schema:
        schema = {"enum": [choice for choice in schema["enum"] if choice is not None]}
    elif each.metadata["omitted"] and (names := [name for name in schema.get("type", ()) if name != "null"]):
        schema = {**schema, "type": names[0] if len(names) == 1 else names}
    if each.name in texts:
        schema = {**schema, "description": texts[each.name]}
    if "items" in limits:
        limits["items"] = {**schema["items"], **limits["items"]}
    schema = {**schema, **limits}  # not in place: a schema that the field itself gives is asked for again
    if each.default is not MISSING and not each.metadata["omitted"]:
        schema["default"] = each.default
    # a class is an inner section, which has a schema of its own
    elif each.default_factory is not MISSING and not isinstance(each.default_factory, type):
        schema["default"] = each.default_factory()
    return schema


def _default_of(each: Field) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _type_schema(hint: Any, described: bool) -> dict:
    """`int | None` -> {"type": ["integer", "null"]}; a section -> its own schema; Literal -> its choices."""
    if isinstance(hint, type) and issubclass(hint, Section):
        return hint.schema(described)
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is list:
        return {"type": "array", "items": _type_schema(get_args(hint)[0], described)}
    if get_origin(hint) in (types.UnionType, Union):
        parts = [_type_schema(part, described) for part in get_args(hint)]
        if any("enum" in part for part in parts):
            return {"enum": [choice for part in parts for choice in part.get("enum", [None])]}
        merged = {name: value for part in parts for name, value in part.items()}
        return {**merged, "type": [part["type"] for part in parts]}
    return {"type": JSON_TYPES[get_origin(hint) or hint]}


def check_folder_name(name: str, key: str) -> Wrong:
    """A name leads neither out of runs/ nor out of data/: it would take over another folder."""
    if not re.fullmatch(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*", name) or name != name.strip():
        what = f"is {json.dumps(name, ensure_ascii=False)}; it must be the name of one folder: no slash, no dot first"
        yield key, what
    if (length := len(name.encode(errors="replace"))) > LONGEST_NAME:
        yield key, f"has {length} bytes; it must have at most {LONGEST_NAME}: it names a folder"


@cache
def schema_file() -> dict:
    """recipes/schema.json, generated: our sections from their classes, model and training from the libraries'."""
    return json.loads((RECIPES / "schema.json").read_text(encoding="utf-8"))
