"""Read a JSON file strictly, and check it against the part of JSON Schema that our generated schemas use."""

import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pretraining.errors import UserError, abbreviated, cut, did_you_mean, nearest
from pretraining.outside.files import parse_json, read_bytes
from pretraining.runtime.installation import WORKPLACE

MOST_CHOICES = 30
"""That a message lists."""
MOST_UNKNOWN = 10
BOUNDS: dict[str, tuple[str, Callable]] = {
    "minimum": ("at least", operator.ge),
    "exclusiveMinimum": ("greater than", operator.gt),
    "maximum": ("at most", operator.le),
    "exclusiveMaximum": ("less than", operator.lt),
}
TYPE_NAMES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "a string",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def display_path(path: Path) -> str:
    """Name a file for messages: relative to where runs/ and data/ are if it is inside, else as given."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(WORKPLACE)) if absolute.is_relative_to(WORKPLACE) else str(path)


def read_json(path: Path) -> dict:
    """Read the object in a JSON file.

    Raises `UserError` for no such file, not UTF-8, a syntax error (with line and column), a key written twice, NaN or
    Infinity, or something other than an object at the top.
    """
    where = display_path(path)
    try:
        # -sig: editors on Windows may write a byte order mark first
        text = read_bytes(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 text (byte {error.start})") from None

    def unique(pairs: list) -> dict:
        # json.loads would keep the last of two and say nothing
        for key, times in Counter(key for key, _ in pairs).items():
            if times > 1:
                written = re.compile(re.escape(json.dumps(key)) + r"\s*:")
                lines = [str(n) for n, line in enumerate(text.splitlines(), 1) if written.search(line)]
                place = f"line{'s' if len(lines) > 1 else ''} {', '.join(lines)}"
                raise UserError(f"{where}: {place}: key {key!r} is written twice")
        return dict(pairs)

    try:
        value = load_json(text, where, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: line {error.lineno} column {error.colno}: {error.msg}") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: must hold one JSON object, not {_shown(value)}")
    return value


def load_json(text: str, where: str, **options: Any) -> Any:
    """Call `parse_json`, but raise `UserError` for what is no error of syntax, and for NaN, Infinity and 1e400."""

    def refuse(constant: str) -> None:
        raise UserError(f"{where}: {constant} is not JSON; write a number or null")

    def finite(kind: type, number: str) -> Any:
        if math.isinf(float(number)):
            # cut: it may have thousands of digits
            raise UserError(f"{where}: {number[:40]} is too large for a number")
        return kind(number)

    numbers = {"parse_float": partial(finite, float), "parse_int": partial(finite, int)}
    hooks = {"parse_constant": refuse, **numbers}
    try:
        return parse_json(text, **hooks, **options)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def check(value: Any, schema: dict, where: str, key: str = "", root: dict | None = None) -> Any:
    """Return `value` as `schema` reads it, or raise one line that names the file, the dotted key and what is wrong.

    These keywords are known: type, const, enum, properties / required / patternProperties / additionalProperties,
    items, minItems, minLength, pattern (of the whole string), minimum, exclusiveMinimum, maximum, exclusiveMaximum,
    anyOf, oneOf (of required lists), propertyNames (a pattern), allOf with if / then, and $ref into $defs. As in JSON
    Schema, 1e9 is an integer, and is returned as one; a bool is never a number.
    `"format": "float"` marks numbers that the library behind the key takes as floats only, and `"some_of"` lists keys
    of which one at least must hold something. No `min_x` may be greater than its `max_x`.

    where: the file (or option) that messages name. key: the dotted key of `value` inside it. Raises `UserError` for the
    first thing that is wrong.
    """
    # $ref points into the outermost schema, whatever the depth
    root = schema if root is None else root
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in schema:
        return _check_any(value, schema["anyOf"], where, key, root)
    value = _check_alone(value, schema, where, key, root)
    if isinstance(value, dict):
        value = _check_object(value, schema, where, key, root)
    if isinstance(value, list) and "items" in schema:
        inner, right = schema["items"], _is_right(schema["items"])
        items = enumerate(value)
        value = [each if right(each) else check(each, inner, where, f"{key}.{i}", root) for i, each in items]
    return value


def _is_right(schema: dict) -> Callable[[Any], bool]:
    """Make a quick test whose yes means that `check` would return a value as it is; a no means nothing.

    A manifest may list 100,000 shards, and a marker a million files.
    """
    kind, keywords = schema.get("type"), schema.keys() - {"type"}
    if kind == "integer" and keywords <= {"minimum", "maximum"}:
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        return lambda value: type(value) is int and low <= value <= high
    if kind == "string" and keywords == {"pattern"}:
        matches = re.compile(schema["pattern"]).fullmatch
        return lambda value: type(value) is str and matches(value) is not None
    if kind == "object" and keywords == {"required", "properties"}:
        required = set(schema["required"])
        tests = [(key, _is_right(inner)) for key, inner in schema["properties"].items()]
        return lambda value: (
            type(value) is dict
            and required <= value.keys()
            and all(test(value[key]) for key, test in tests if key in value)
        )
    return lambda value: False


def _check_any(value: Any, branches: list[dict], where: str, key: str, root: dict) -> Any:
    """Return the value as the first branch that fits reads it.

    If none fits, the error is that of the last branch, or of the one for lists, objects or words if it is one.
    """
    for branch in branches:
        try:
            return check(value, branch, where, key, root)
        except UserError:
            continue
    lists = [branch for branch in branches if branch.get("type") == "array"]
    if hint := "".join(_list_hint(value, branch, root) for branch in lists):
        raise problem(where, key, f"is {_shown(value)}{hint}")
    # the branch of its own type says what is wrong inside; beside lists alone, a string was meant as one of the words
    kind = {list: "array", dict: "object"}.get(type(value))
    same = [branch for branch in branches if kind and branch.get("type") == kind]
    words = [branch for branch in branches if "enum" in branch]
    is_word = isinstance(value, str) and len(words) + len(lists) == len(branches)
    return check(value, (same or (words if is_word else branches))[-1], where, key, root)


def _check_alone(value: Any, schema: dict, where: str, key: str, root: dict) -> Any:
    """Check type, choices and limits: all but what is inside a list or an object."""
    wanted = schema.get("type", [])
    names = [wanted] if isinstance(wanted, str) else wanted
    if names and not any(_is_type(value, name) for name in names):
        wish = " or ".join(TYPE_NAMES[name] for name in names)
        hint = _list_hint(value, schema, root) or _quote_hint(value, names)
        raise problem(where, key, f"is {_shown(value)} where {wish} is wanted{hint}")
    # 1e9 is an integer in JSON Schema, and a float to Python
    if isinstance(value, float) and "integer" in names and "number" not in names:
        value = int(value)
    elif names and schema.get("format") == "float" and _is_type(value, "number"):
        value = float(value)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    # the type too, because 1 == True in Python
    if choices is not None and not any(value == choice and type(value) is type(choice) for choice in choices):
        texts = [choice for choice in choices if isinstance(choice, str)]
        near = nearest(value, texts) if isinstance(value, str) else ""
        shown = ", ".join(json.dumps(choice) for choice in choices[:MOST_CHOICES])
        more = ", ..." * (len(choices) > MOST_CHOICES)
        raise problem(where, key, f"is {_shown(value)}, not one of {shown}{more}{near}")
    if isinstance(value, str) and len(value.strip()) < schema.get("minLength", 0):
        raise problem(where, key, "is empty; write a name, or leave it out")
    if isinstance(value, str) and "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        raise problem(where, key, f"is {in_brief(value)}, which does not fit {schema['pattern']}")
    if isinstance(value, list) and len(value) < schema.get("minItems", 0):
        raise problem(where, key, f"must have at least {schema['minItems']} entry")
    for name, (words, holds) in BOUNDS.items():
        if name in schema and _is_type(value, "number") and not holds(value, schema[name]):
            raise problem(where, key, f"is {value}; it must be {words} {schema[name]}")
    return value


def _is_type(value: Any, name: str) -> bool:
    # first: a bool of Python is an int too
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    types = {"number": (int, float), "string": str, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, types.get(name, ()))


def _list_hint(value: Any, schema: dict, root: dict) -> str:
    """Return what to write in place of a string that holds, with commas, what should be a list."""
    if not isinstance(value, str):
        return ""
    meant = [part.strip() for part in value.split(",")]
    return f"; write it as a list: {json.dumps(meant)}" if fits(meant, schema, root) else ""


POWERS = {"k": 3, "m": 6, "b": 9, "t": 12}
"""What people write behind a count, as powers of ten."""


def _quote_hint(value: Any, names: list[str]) -> str:
    """Return what to write instead, if only the quotes are wrong, or a count ends in a letter."""
    if not isinstance(value, str):
        scalar = isinstance(value, int | float) and "string" in names
        return f'; write "{value}" with quotes' if scalar else ""
    try:
        meant = json.loads(value.strip().lower())
    except ValueError:
        counted = re.fullmatch(r"([0-9.]+)([kmbt])", value.strip().lower()) if "integer" in names else None
        return f"; write {counted[1]}e{POWERS[counted[2]]}" if counted else ""
    fits = any(_is_type(meant, name) for name in names if name not in ("array", "object"))
    return f"; write {value.strip().lower()} without quotes" if fits else ""


def _check_object(value: dict, schema: dict, where: str, key: str, root: dict) -> dict:
    properties, names = schema.get("properties", {}), schema.get("propertyNames", {})
    others = schema.get("additionalProperties", {})
    of_patterns = schema.get("patternProperties", {}).items()
    patterns = [(re.compile(pattern).fullmatch, _is_right(inner), inner) for pattern, inner in of_patterns]

    def fitting(name: str) -> tuple | None:
        return next((each for each in patterns if each[0](name)), None)

    if unknown := [each for each in value if others is False and not (each in properties or fitting(each))]:
        # all of them at once, with what each was meant to be
        hints = {name: _valid_keys(name, properties, key, root) for name in unknown[:MOST_UNKNOWN]}
        if len(unknown) == 1:
            raise problem(where, _below(key, unknown[0]), f"unknown key{hints[unknown[0]]}")
        # all valid keys at every one of them would be too much
        named = [
            f"{each!r} ({hint[2:]})" if "did you" in hint else repr(each) for each, hint in hints.items()
        ]
        more = f", and {len(unknown) - MOST_UNKNOWN} more" if len(unknown) > MOST_UNKNOWN else ""
        raise problem(where, key, f"{len(unknown)} unknown keys: {', '.join(named)}{more}")
    checked = {}
    for name, item in value.items():
        dotted = _below(key, name)
        if names and not re.fullmatch(names["pattern"], name):
            raise problem(where, dotted, f"unknown key; {names['description']}")
        if name in properties:
            checked[name] = check(item, properties[name], where, dotted, root)
        elif pattern := fitting(name):
            _, right, inner = pattern
            checked[name] = item if right(item) else check(item, inner, where, dotted, root)
        else:
            checked[name] = check(item, others, where, dotted, root) if isinstance(others, dict) else item
    for name in schema.get("required", []):
        if name not in value:
            raise problem(where, _below(key, name), "is missing")
    one_of = [branch["required"][0] for branch in schema.get("oneOf", [])]
    given = [name for name in one_of if name in value]
    if one_of and len(given) != 1:
        has = f"has {' and '.join(given)}" if given else "has none of them"
        raise problem(where, key, f"needs exactly one of {', '.join(one_of)}; it {has}")
    full = {name: each["default"] for name, each in properties.items() if "default" in each} | checked
    some = schema.get("some_of", [])
    if some and all(full.get(name) in (None, [], "") for name in some):
        raise problem(where, key, f"needs at least one of {', '.join(some)}")
    for name, least in full.items():
        other = f"max_{name.removeprefix('min_')}"
        most = full.get(other) if name.startswith("min_") else None
        if _is_type(least, "number") and _is_type(most, "number") and least > most:
            what = f"{name} is {least}, more than {other} {most}: nothing is left between them"
            raise problem(where, _below(key, name if name in checked else other), what)
    for condition in schema.get("allOf", []):
        if fits(checked, condition["if"], root):
            checked = check(checked, condition["then"], where, key, root)
    return checked


def fits(value: Any, schema: dict, root: dict | None = None) -> bool:
    """Return whether `check` accepts the value."""
    try:
        check(value, schema, "", root=root)
    except UserError:
        return False
    return True


def filled(value: Any, schema: dict) -> Any:
    """Add the schema's defaults to `value` at every depth, with those of the `if` / `then` branches that it fits."""
    if isinstance(value, list):
        return [filled(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    properties = dict(schema.get("properties", {}))
    for condition in schema.get("allOf", []):
        if fits(value, condition["if"]):
            properties |= condition["then"].get("properties", {})
    defaults = {key: each["default"] for key, each in properties.items() if "default" in each}
    # What is written comes first, in its order: a manifest keeps its bytes when a key gets a default.
    # the second `value` puts the written values back over the defaults
    whole = {**value, **defaults, **value}
    return {key: filled(item, properties.get(key, {})) for key, item in whole.items()}


def suggestion(key: str, schema: dict) -> str | None:
    """Guess which key of the schema a dotted one was meant to be: `; did you mean 'x'?`, empty without a guess.

    None: the key is valid.
    """
    known, above = list(_all_keys(schema, schema)), ""
    for name in key.split("."):
        dotted = _below(above, name)
        # the number of an entry is no key itself
        if _of_first_entry(dotted) not in known and not name.isdecimal():
            below = f"{_of_first_entry(above)}." if above else ""
            inner = [each.removeprefix(below) for each in known if each.startswith(below)]
            return _valid_keys(name, {each: {} for each in inner if "." not in each}, above, schema)
        above = dotted
    return None


def _valid_keys(name: str, properties: dict, key: str, root: dict) -> str:
    """Guess what was meant: an entry of a list, a key of another place, or the nearest key here; else list all keys."""
    names = [valid for valid in properties if valid != "$schema"]
    # "sources[0]" for sources.0
    whole, bracket, index = name.partition("[")
    if bracket and whole in names:
        return did_you_mean([f"{_below(key, whole)}.{index.rstrip(']')}"])
    if "." in name and not key:
        section, _, inner = name.partition(".")
        near = suggestion(name, root)
        return f'; write it as an object: "{section}": {{"{inner}": ...}}' if near is None else near
    # the dotted keys that end with each name, outermost first, without those of this place
    places: dict[str, list[str]] = {}
    for place in sorted(dict.fromkeys(_all_keys(root, root)), key=lambda place: place.count(".")):
        at, _, last = place.rpartition(".")
        # a list may have no entry: not beside a place that is always there
        if at != _of_first_entry(key) and not (last in places and ".0." in place):
            places.setdefault(last, []).append(place)
    close = get_close_matches(name, names, 1)
    # names of other frameworks, which a recipe's schema lists
    meant = root.get("other_names", {}).get(name.lower(), [])
    if name in places:
        elsewhere = [*meant, *places[name]][: 3 - len(close)]
        return did_you_mean([*elsewhere, *(_below(key, each) for each in close)])
    if meant:
        return did_you_mean(meant)
    if here := close or abbreviated(name, names):
        return did_you_mean([_below(key, each) for each in here[:3]])
    # 0.92: among so many names a loose match would be a wrong guess
    if misspelt := get_close_matches(name, places, 1, cutoff=0.92):
        return did_you_mean(places[misspelt[0]][:3])
    if there := abbreviated(name, places):
        return did_you_mean([places[each][0] for each in there[:3]])
    # more would not be read in one line
    return f"; valid keys: {', '.join(names)}" if len(names) <= 12 else ""


def _of_first_entry(key: str) -> str:
    """Write a dotted key as the schema knows it, with the first entry of every list: sources.3 is sources.0 there."""
    return re.sub(r"\.\d+(?=\.|$)", ".0", key)


def _all_keys(schema: dict, root: dict, key: str = "") -> Iterator[str]:
    """Yield every dotted key that a value of the schema may have; a list has its first entry only."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    for name, inner in schema.get("properties", {}).items():
        dotted = _below(key, name)
        yield dotted
        yield from _all_keys(inner, root, dotted)
    if "items" in schema:
        yield from _all_keys(schema["items"], root, f"{key}.0")
    for branch in [*schema.get("anyOf", []), *(each["then"] for each in schema.get("allOf", []))]:
        yield from _all_keys(branch, root, key)


def _below(key: str, name: str) -> str:
    """Return the dotted key of `name` in the object of `key`, which is empty for the whole file."""
    return f"{key}.{name}" if key else name


def problem(where: str, key: str, what: str) -> UserError:
    """Make the one-line error: file, dotted key, what is wrong."""
    return UserError(": ".join(filter(None, (cut(where, 1000), key, what))))


Wrong = Iterator[tuple[str, str]]
"""What the checks of a recipe yield: dotted keys, and what is wrong with each. The first one ends the reading."""


def refuse_first(wrong: Wrong, where: str) -> None:
    """Raise `UserError` for the first thing that a check yields; what would come behind it is not looked at."""
    for key, what in wrong:
        raise problem(where, key, what)


class Difference(NamedTuple):
    """One value in which two files differ."""

    key: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.key}: {in_brief(self.there)} there, {in_brief(self.here)} here"


def differences(there: Any, here: Any, key: str = "") -> list[Difference]:
    """List the single values in which two JSON values differ, with `--set`'s keys; a missing one counts as null."""
    if isinstance(there, dict) and isinstance(here, dict):
        pairs = [(name, there.get(name), here.get(name)) for name in there | here]
    elif isinstance(there, list) and isinstance(here, list):
        pairs = [(str(number), *pair) for number, pair in enumerate(zip_longest(there, here))]
    else:
        return [] if there == here else [Difference(key, there, here)]
    return [each for name, one, other in pairs for each in differences(one, other, _below(key, name))]


def listed(texts: Sequence, between: str = "; ") -> str:
    """Write the first three texts, and how many more there are."""
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return between.join(map(str, texts[:3])) + more


def in_brief(value: Any) -> str:
    """Write a value as JSON, 80 characters of it at most."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"the string {json.dumps(value, ensure_ascii=False)}"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value)
