"""What a recipe leaves out: the defaults that its schema records."""

from typing import Any

from pretraining.schema import fits

SECTIONS = ("data", "budget", "loss", "optimizer", "mup", "speed")
SECTIONS += ("checkpoints", "monitors", "evaluation", "report")
NESTED = {"data": ("dedup", "decontaminate"), "budget": ("ramp",), "monitors": ("spikes", "profile")}
"""Objects in them that have defaults of their own; null stays null."""


def with_defaults(values: dict, schema: dict, name: str) -> dict:
    """Our own sections with their defaults; the libraries' sections stay as they were written."""
    values = {key: value for key, value in values.items() if key != "$schema"}
    schema = schema["properties"]
    for section in SECTIONS:
        values[section] = _filled(values.get(section, {}), schema[section])
        for key in NESTED.get(section, ()):
            given = values[section].get(key, {})
            if given is not None:
                values[section][key] = _filled(given, schema[section]["properties"][key])
    source = schema["data"]["properties"]["sources"]["items"]
    values["data"]["sources"] = [_filled(entry, source) for entry in values["data"]["sources"]]
    return {"name": name, "deepspeed": None, **values}


def filled_deeply(value: Any, schema: dict) -> Any:
    """`value` with the schema's defaults at every depth, those of the `if` / `then` branches it fits included."""
    if isinstance(value, list):
        return [filled_deeply(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    properties = dict(schema.get("properties", {}))
    for condition in schema.get("allOf", []):
        if fits(value, condition["if"]):
            properties |= condition["then"].get("properties", {})
    filled = {**value, **_filled(value, {"properties": properties})}
    return {key: filled_deeply(item, properties.get(key, {})) for key, item in filled.items()}


def _filled(values: dict, schema: dict) -> dict:
    properties = schema["properties"].items()
    return {**{key: value["default"] for key, value in properties if "default" in value}, **values}
