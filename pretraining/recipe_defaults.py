"""What a recipe leaves out: the defaults that its schema records."""

SECTIONS = ("data", "budget", "loss", "optimizer", "mup", "speed")
SECTIONS += ("checkpoints", "monitors", "evaluation", "report")


def with_defaults(values: dict, schema: dict, name: str) -> dict:
    """Our own sections with their defaults; the libraries' sections stay as they were written."""
    values = {key: value for key, value in values.items() if key != "$schema"}
    schema = schema["properties"]
    for section in SECTIONS:
        values[section] = _filled(values.get(section, {}), schema[section])
    spikes = schema["monitors"]["properties"]["spikes"]
    values["monitors"]["spikes"] = _filled(values["monitors"].get("spikes", {}), spikes)
    if values["monitors"]["profile"] is not None:
        profile = schema["monitors"]["properties"]["profile"]
        values["monitors"]["profile"] = _filled(values["monitors"]["profile"], profile)
    source = schema["data"]["properties"]["sources"]["items"]
    values["data"]["sources"] = [_filled(entry, source) for entry in values["data"]["sources"]]
    for section in ("dedup", "decontaminate"):
        if values["data"][section] is not None:
            nested = schema["data"]["properties"][section]
            values["data"][section] = _filled(values["data"][section], nested)
    if values["budget"]["ramp"] is not None:
        ramp = schema["budget"]["properties"]["ramp"]
        values["budget"]["ramp"] = _filled(values["budget"]["ramp"], ramp)
    return {"name": name, "deepspeed": None, **values}


def _filled(values: dict, schema: dict) -> dict:
    properties = schema["properties"].items()
    return {**{key: value["default"] for key, value in properties if "default" in value}, **values}
