"""The shape from where it is: `model.from` names a repository of the hub, a folder, or a config.json.

Nothing but config.json is fetched. What was read is kept in the run's recipe.json, with the commit and a digest, so
that a resume asks nobody.

Keys that the type does not know may still shape the model: transformers reads older names of many. It is asked once, in
a process of its own; the answer is kept (runtime/answers.py).
"""

import hashlib
import json
import os
import re
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pretraining.errors import UserError, reason_of, require
from pretraining.outside.files import read_bytes
from pretraining.outside.schema import check, problem, read_json
from pretraining.recipe.model import EXACT, SPECIAL_IDS, checked_model, known_types, read_config
from pretraining.recipe.section import schema_file
from pretraining.recipe.sections import Weights
from pretraining.runtime.answers import answered, ask
from pretraining.runtime.installation import PACKAGE

KEY = "model.from"
PROGRAM = PACKAGE / "model" / "published_config.py"
OF_THE_RUN = ("attn_implementation", "experts_implementation", "output_router_logits", "use_cache")
"""Keys that say how a model is run, not what it is: kernels, and what inference needs. A recipe has its own."""


def read_published(model: dict, where: str) -> tuple[dict, str]:
    """Return a section with the keys of the config.json that its `from` names, and a sentence about them.

    Keys beside `from` replace those that are read. Special tokens are left out: they are the data's tokenizer's.
    `UserError` if there is no such config.json, or its model does not train here. where: the recipe.
    """
    beside = {key: value for key, value in model.items() if key not in Weights.PUBLISHED}
    schema = {"type": "object", "properties": Weights.PUBLISHED, "required": ["from"]}
    given = check({key: model[key] for key in model if key not in beside}, schema, where, "model")
    name, _, revision = given["from"].partition("@")
    if revision and "revision" in given:
        raise problem(where, "model.revision", f"is written twice: {KEY} names {revision} too; leave one out")
    file, commit = _find(name, given.get("revision") or revision or None, where)
    origin = {"from": name, **({"revision": commit} if commit else {})}
    # read first: its errors are those of the file
    config, place = read_json(file), f"{where}: {KEY}: the config.json of {name}"
    origin["digest"] = f"sha256:{hashlib.sha256(read_bytes(file)).hexdigest()}"
    section, said = _section(config, beside.get("model_type"), place)
    kind = section["model_type"]
    if beside.get("model_type", kind) != kind:
        what = f"is {beside['model_type']}, and the config.json of {name} is of a {kind}; leave it out"
        raise problem(where, "model.model_type", what)
    at = f" at {commit[:12]}" if commit else ""
    read = f"{kind} from {name}{at}, config.json {origin['digest'][:19]}"
    return {**origin, **section, **beside}, "; ".join([read, *said])


def with_origin(model: Any, key: str, value: str) -> dict:
    """Return a section, as it is written, with another `from` or `revision`.

    A section that states a type is a whole shape, whose place another one takes; what training begins with stays.
    """
    model = model if isinstance(model, dict) else {}
    if "model_type" in model:
        model = {each: model[each] for each in ("from", *Weights.names()) if each in model}
    if key == "from":
        model = {each: value for each, value in model.items() if each != "revision"}
    return {**model, key: value}


def _find(name: str, revision: str | None, where: str) -> tuple[Path, str | None]:
    """Return the path of a config.json and, of a repository of the hub, its commit."""
    try:
        path = Path(name).expanduser()
        is_here = path.exists() or name.startswith((".", "/", "~")) or name.endswith(".json")
        file = path / "config.json" if path.is_dir() else path
        is_file = file.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long, or of a user who is none
        raise problem(where, KEY, f"{name[:100]}: is no path ({error})") from None
    if is_here:
        if not is_file:
            raise problem(where, KEY, f"{name}: no config.json there (looked in {Path.cwd()})")
        if revision:
            what = f"is {revision}, and {name} is a file of this machine; leave it out"
            raise problem(where, "model.revision", what)
        return file, None
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise problem(where, KEY, f"{name}: neither a name on the hub (org/model) nor a path that is there")
    hub = require("huggingface_hub", f"{KEY} {name}")
    errors = require("huggingface_hub.errors", f"{KEY} {name}")
    page = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/{name}"
    try:
        file = Path(hub.hf_hub_download(name, "config.json", revision=revision))
    except errors.GatedRepoError as error:
        token = "" if hub.get_token() else ", then export HF_TOKEN=TOKEN of that account (or hf auth login)"
        raise problem(where, KEY, f"{name} is gated: accept its terms at {page}{token}") from error
    except errors.RepositoryNotFoundError as error:
        what = f"the hub has no model {name} that this account may see; check the name, or name a folder"
        raise problem(where, KEY, what) from error
    except errors.RevisionNotFoundError as error:
        raise problem(where, "model.revision", f"is {revision}, which {name} does not have") from error
    except errors.LocalEntryNotFoundError as error:
        what = f"{name}: not fetched yet, and the hub does not answer; fetch it where there is a network"
        raise problem(where, KEY, f"{what}: hf download {name} config.json") from error
    except errors.EntryNotFoundError as error:
        raise problem(where, KEY, f"{name} has no config.json; name a model of transformers") from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        reason = reason_of(error)
        raise problem(where, KEY, f"{name}: the hub does not give its config.json ({reason})") from error
    # in the cache its folder has the commit's name
    return file, file.parent.name


def _section(config: dict, model_type: str | None, where: str) -> tuple[dict, list[str]]:
    """Return the model section of a published configuration, checked, and what it says of itself otherwise.

    model_type: the recipe's, for a configuration without one.
    """
    known, said = known_types(), []
    inner = config.get("text_config")
    inner = inner if isinstance(inner, dict) else {}
    if str(config.get("model_type")) not in known and str(inner.get("model_type")) in known:
        said.append(f"the language model {inner['model_type']} alone of its {config.get('model_type')}")
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {**tied, **inner}
    kind = config.get("model_type") or model_type
    if kind is None:
        raise problem(where, "model_type", "is missing; write it beside from")
    if not isinstance(kind, str) or kind not in known:
        # says why, or what was meant
        checked_model({"model_type": str(kind)[:100]}, where)
        raise problem(where, "model_type", f"is {kind!r}, of which this recipe's own module is the author")
    own = known[kind]["properties"]
    ours = (*SPECIAL_IDS, *OF_THE_RUN, *Weights.names(), *Weights.PUBLISHED)
    section, changes = read_config({**config, "model_type": kind})
    section = {key: value for key, value in section.items() if key not in ours}
    said += [changes] if changes else []
    if missing := {key: own[key].get("default") for key in known[kind]["required"] if key not in section}:
        section |= missing
        said.append(f"{json.dumps(missing)} by default")
    others = {key: section.pop(key) for key in list(section) if key not in own}
    # the recipe's schema checks these types, `checked_model` the others
    section = check(section, known[kind], where, root=schema_file()) if kind in EXACT else section
    section = checked_model(section, where)
    if others:
        # the keys of the type that transformers reads from those that the type does not know
        question = json.dumps({"section": {**section, **others}, "own": sorted(own)}, sort_keys=True)
        depends_on = (version("transformers"), PROGRAM.read_text(encoding="utf-8"), question)
        asked = partial(ask, [str(PROGRAM)], question, HF_HUB_OFFLINE="1")
        answer = answered("config-", depends_on, "read", asked)
        if "error" in answer:
            raise UserError(f"{where}: transformers cannot read it ({answer['error']})")
        section |= (read := answer["read"])
        left_out = "left out: transformers makes the same model without"
        said.append(f"{', '.join(others)} " + (f"read as {json.dumps(read)}" if read else left_out))
    return section, said
