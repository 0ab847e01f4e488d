"""Strict files: every mistake in a JSON file is one line that names file, key and remedy."""

import json

import pytest

from pretraining.outside.schema import check, read_json, suggestion
from tests.gear.finished_data import refusal
from tests.gear.runs import REPOSITORY, completed

SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 1},
        "rate": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "exact": {"type": "number", "format": "float"},
        "flag": {"type": "boolean"},
        "word": {"type": ["string", "null"]},
        "mode": {"enum": ["linear", "cosine", 0]},
        "bucket": {"anyOf": [{"const": "auto"}, {"type": "integer"}]},
        "items": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/item"}},
        "kind": {
            "type": "object",
            "allOf": [
                {
                    "if": {"properties": {"type": {"const": "a"}}},
                    "then": {"properties": {"type": {}, "only_a": {}}, "additionalProperties": False},
                }
            ],
        },
    },
    "required": ["size"],
    "additionalProperties": False,
    "$defs": {
        "item": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "oneOf": [{"required": ["x"]}, {"required": ["y"]}],
            "additionalProperties": False,
        }
    },
}

WRONG = {
    "unknown key": ({"size": 1, "rat": 0.5}, "f.json: rat: unknown key; did you mean 'rate'?"),
    "missing key": ({}, "f.json: size: is missing"),
    "number as string": (
        {"size": "512"},
        'f.json: size: is the string "512" where an integer is wanted; write 512',
    ),
    "float as string": ({"size": 1, "rate": "6e-4"}, "write 6e-4 without quotes"),
    "bool as string": ({"size": 1, "flag": "True"}, "write true without quotes"),
    "string as number": ({"size": 1, "word": 5}, 'write "5" with quotes'),
    "bool as integer": ({"size": True}, "f.json: size: is true where an integer is wanted"),
    "fraction as integer": ({"size": 1.5}, "is 1.5 where an integer is wanted"),
    "too small": ({"size": 0}, "f.json: size: is 0; it must be at least 1"),
    "not above": ({"size": 1, "rate": 0}, "it must be greater than 0"),
    "too large": ({"size": 1, "rate": 1.1}, "it must be at most 1"),
    "enum": ({"size": 1, "mode": "cosin"}, "did you mean 'cosine'?"),
    "false is not 0": ({"size": 1, "mode": False}, "f.json: mode: is false, not one of"),
    "neither auto nor number": ({"size": 1, "bucket": "5"}, "write 5 without quotes"),
    "empty list": ({"size": 1, "items": []}, "f.json: items: must have at least 1"),
    "inside a list": (
        {"size": 1, "items": [{"x": 1}, {"z": 1}]},
        "f.json: items.1.z: unknown key; valid keys: x, y",
    ),
    "two of one": (
        {"size": 1, "items": [{"x": 1, "y": 1}]},
        "items.0: needs exactly one of x, y; it has x and y",
    ),
    "none of one": ({"size": 1, "items": [{}]}, "items.0: needs exactly one of x, y; it has none"),
    "conditional": ({"size": 1, "kind": {"type": "a", "only_b": 1}}, "kind.only_b: unknown key"),
}


NESTED = {
    "type": "object",
    "properties": {
        "rate": {"type": "object", "properties": {"seed": {}, "peak": {}}, "additionalProperties": False},
        "texts": {"type": "array", "items": {"$ref": "#/$defs/text"}},
        "rules": {"allOf": [{"if": {"required": []}, "then": {"properties": {"min_words": {}, "seed": {}}}}]},
    },
    "additionalProperties": False,
    "$defs": {
        "text": {
            "type": "object",
            "properties": {"weight": {}, "noise": {"type": "object", "properties": {"seed": {}}}},
            "additionalProperties": False,
        }
    },
}
ELSEWHERE = {
    "of a section": ({"peak": 1}, "f.json: peak: unknown key; did you mean 'rate.peak'?"),
    "of another section": ({"rate": {"min_words": 1}}, "did you mean 'rules.min_words'?"),
    "of a list's entries": ({"rate": {"weight": 1}}, "did you mean 'texts.0.weight'?"),
    "misspelt": ({"min_wrods": 1}, "f.json: min_wrods: unknown key; valid keys: rate, texts, rules"),
    "hardly misspelt": ({"min_worrds": 1}, "did you mean 'rules.min_words'?"),
    # texts.0.noise.seed too, but there may be no texts
    "of several places": ({"seed": 1}, "did you mean 'rate.seed' or 'rules.seed'?"),
    "and near here": (
        {"texts": [{"weigth": 1}]},
        "f.json: texts.0.weigth: unknown key; did you mean 'texts.0.weight'?",
    ),
    "of the next entry": (
        {"texts": [{}, {"weigths": 1}]},
        "texts.1.weigths: unknown key; did you mean 'texts.1.weight'?",
    ),
    "initials": ({"texts": [{"mnw": 1}]}, "texts.0.mnw: unknown key; valid keys: weight, noise"),
    "beginnings of words": ({"rate": {"min_wor": 1}}, "did you mean 'rules.min_words'?"),
    "a dotted key": (
        {"rate.seed": 1},
        'f.json: rate.seed: unknown key; write it as an object: "rate": {"seed": ...}',
    ),
    "a dotted key of another place": ({"rate.weight": 1}, "did you mean 'texts.0.weight'?"),
    "an index in brackets": ({"texts[1]": {}}, "f.json: texts[1]: unknown key; did you mean 'texts.1'?"),
}


CASES = [(SCHEMA, *each) for each in WRONG.values()] + [(NESTED, *each) for each in ELSEWHERE.values()]


@pytest.mark.parametrize("schema, value, message", CASES, ids=[*WRONG, *ELSEWHERE])
def test_each_mistake_is_named(schema, value, message):
    """File, dotted key, what is wrong, what to write; a key of another place is given as `--set` takes it."""
    assert message in refusal(check, value, schema, "f.json")


def test_a_dotted_key_is_looked_up_whole():
    """As `--allow_change` needs it: None for a valid key, which may be one of any entry of a list."""
    assert suggestion("texts.7.noise.seed", NESTED) is None and suggestion("rate", NESTED) is None
    assert suggestion("rate.paek", NESTED) == "; did you mean 'rate.peak'?"
    assert suggestion("texts.3.nois.seed", NESTED) == "; did you mean 'texts.3.noise'?"
    assert suggestion("peak", NESTED) == "; did you mean 'rate.peak'?"


def test_right_values_pass_and_come_back_in_the_type_the_libraries_want():
    """1e9 is an integer, an integer is a number, and a float-only key gets a float."""
    given = {"size": 1e9, "rate": 1, "exact": 1, "word": None, "bucket": "auto", "kind": {"type": "b"}}
    value = check(given, SCHEMA, "f")
    assert (value["size"], value["rate"], value["exact"]) == (10**9, 1, 1.0)
    assert [type(value[key]) for key in ("size", "rate", "exact")] == [int, int, float]


BROKEN_FILES = {
    "syntax": (b'{\n "a": 1\n "b": 2}', "line 3 column 2"),
    "duplicate on one line": (b'{"a": 1, "a": 2}', "line 1: key 'a' is written twice"),
    "overflow": (b'{"a": 1e400}', "1e400 is too large for a number"),
    "duplicate": (b'{"a": {\n "n": 1,\n "n": 2}}', "lines 2, 3: key 'n' is written twice"),
    "not an object": (b"[1]", "must hold one JSON object"),
    "NaN": (b'{"a": NaN}', "NaN is not JSON"),
    "not UTF-8": (b'{"a": "\xff"}', "is not UTF-8 text (byte 7)"),
}


@pytest.mark.parametrize("content, message", BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_a_broken_file_says_where(tmp_path, content, message):
    """Strict files: syntax, a key written twice and wrong bytes are errors of the user's, not tracebacks."""
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    said = refusal(read_json, path)
    assert str(path) in said and message in said
    assert "nothing.json: cannot be read" in refusal(read_json, tmp_path / "nothing.json")


def test_schema_files_are_those_of_the_installed_libraries():
    """Keys are checked against what is installed: after an upgrade the schemas must be generated anew."""
    completed(["forked", "0", "recipes/generate_schema.py", "--check"])


def test_an_editor_finds_the_schema_and_descriptions_of_the_keys():
    """The first line of every file names the schema; most keys of every section have a description."""
    for folder in ("recipes", "ds_configs"):
        paths = [path for path in (REPOSITORY / folder).glob("*.json") if path.name != "schema.json"]
        firsts = [next(iter(json.loads(path.read_text()).items())) for path in paths]
        assert paths and firsts == [("$schema", "schema.json")] * len(paths)
    schema = json.loads((REPOSITORY / "recipes" / "schema.json").read_text())
    groups = [schema["properties"]["training"], *schema["$defs"].values()]
    for group in groups:
        described = [value for value in group["properties"].values() if "description" in value]
        assert len(described) > 0.8 * len(group["properties"])
