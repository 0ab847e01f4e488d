"""JSON Schema from Python type annotations, as far as configuration classes use them."""

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pretraining.recipe.section import JSON_TYPES


def first_sentence(text: str | None) -> str | None:
    """The first sentence of a docstring as one line, without reStructuredText and Markdown marks."""
    line = " ".join((text or "").split()).replace("``", "`").replace("%%", "%")
    match = re.match(r".*?[^.]\.(?=\s+[A-Z`(]|$)", line)
    return (match.group(0) if match else line) or None


def type_schema(annotation) -> dict:
    """The JSON Schema of a Python type annotation, as far as configuration classes use them."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return union_schema(arguments)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if annotation in JSON_TYPES:
        return {"type": JSON_TYPES[annotation]}
    if annotation is Path:
        return {"type": "string"}
    if typing.is_typeddict(annotation):
        hints = typing.get_type_hints(annotation)
        return object_schema({name: type_schema(hint) for name, hint in hints.items()})
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return {"enum": [member.value for member in annotation]}
    if origin is list or annotation is list:
        return {"type": "array", **({"items": type_schema(arguments[0])} if arguments else {})}
    return {"type": "object"} if origin is dict else {}


def union_schema(arguments: tuple) -> dict:
    """One schema for a union; beside `str`, an enum of strings or an object is the stricter reading."""
    parts = [type_schema(argument) for argument in arguments]
    are_text = [all(isinstance(each, str) for each in part.get("enum", [None])) for part in parts]
    if any(are_text) or any(part.get("type") == "object" for part in parts):
        parts = [part for part in parts if part.get("type") != "string"]
    if len(parts) == 1:
        return parts[0]
    nullable = {"type": "null"} in parts
    typed = [part for part in parts if "properties" in part]
    if typed:
        return {**typed[0], "type": ["object", "null"] if nullable else "object"}
    if any("enum" in part for part in parts):
        free = [part for part in parts if part == {"type": "string"}]
        closed = {"enum": [value for part in parts if part not in free for value in part.get("enum", [None])]}
        return {"anyOf": [closed, *free]} if free else closed
    merged = {"type": [part["type"] for part in parts if "type" in part]}
    items = [part["items"] for part in parts if "items" in part]
    return {**merged, **({"items": items[0]} if items else {})}


def object_schema(properties: dict, required: Iterable[str] = (), **more: Any) -> dict:
    """An object that has no other keys; `more` comes before its properties."""
    needed = {"required": list(required)} if required else {}
    return {"type": "object", **more, "properties": properties, **needed, "additionalProperties": False}


def described(schema: dict, description: str | None, default=dataclasses.MISSING) -> dict:
    """`schema` with a description, and the default where JSON can write it."""
    default = default.value if isinstance(default, enum.Enum) else default
    plain = default is None or isinstance(default, int | float | str | bool | list)
    text = {"description": description} if description else {}
    return {**schema, **text, **({"default": default} if plain else {})}
