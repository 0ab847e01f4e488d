"""Find and mask secrets in texts: nothing that leaves (a line, a log, an event, a page) may hold one."""

import json
import math
import os
import re
from collections.abc import Callable, Collection
from typing import Any

# Lengths are limited, so that a long text takes a time in proportion to its length.
_USER = re.compile(
    # with a password; not the port of host:8080/path@version
    r"(://)[^/?#\s@:]{0,512}:(?!\d{1,5}[/?#])[^\s@]{0,512}@"
    # alone, it is a token here; abfs://container@account and hf://name@revision hold none
    r"|((?:https?|s3a?|gs|gcs)://)[^/?#\s@:]{1,512}@"
)
# a parameter of the query, such as &sig=...: its name is kept, its value is not; $NAME is no secret
_PARAMETER = re.compile(r"([?&;#]([\w.%-]{1,64})=)(?!\$|\*\*\*)[^&;#\s'\")]+")
_SECRET_PARAMETER = re.compile(r"sig|token|key|secret|passw|credential|^s[te]$", re.IGNORECASE)
_KNOWN_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|A[KS]IA[A-Z0-9]{16}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|sk-(?:[a-z]{2,8}\d{0,2}-){0,2}[A-Za-z0-9_]{20,}|xox[abprs]-[\w-]{10,})\b"
)
# training.hub_token=..., "hub_token": "...", --hub_token ...
_ASSIGNED = re.compile(
    r"""((?:token|secret|passw(?:or)?d|credentials?|[_-]key)(?:=|["']\s*[:=]\s*["'])"""
    r"""|--[\w-]{0,64}(?:token|secret|passw(?:or)?d|key)\s)(?!\$|\*\*\*)[^\s"'&]*[^\s"'&:;,)\]}]""",
    re.IGNORECASE,
)
# parts of names such as AWS_SECRET_ACCESS_KEY and HF_TOKEN
_SECRET_VARIABLE = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION_STRING|SAS")
_SHORTEST_SECRET = 8
"""Characters. A shorter value may be an everyday word."""


def without_credentials(text: str) -> str:
    """Write `***` for users and signatures in addresses, and for tokens of a known shape."""
    text = _USER.sub(lambda match: f"{match[1] or match[2]}***@", text)
    secret = _SECRET_PARAMETER.search
    text = _PARAMETER.sub(lambda match: f"{match[1]}***" if secret(match[2]) else match[0], text)
    return _KNOWN_SHAPES.sub("***", text)


def masked(text: str, variables: Collection[str] = ()) -> str:
    """Write `***` for credentials, for values of keys such as hub_token, and for those of variables with secrets.

    variables: names of more variables that hold a secret.
    """
    text = _ASSIGNED.sub(r"\1***", without_credentials(text))
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and (name in variables or _SECRET_VARIABLE.search(name.upper())):
            text = text.replace(value, "***")
    return text


def masked_in(value: Any) -> Any:
    """Mask every text of a JSON value."""
    return changed(value, lambda each: masked(each) if isinstance(each, str) else each)


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change every single value in a JSON value."""
    if isinstance(value, dict):
        return {name: changed(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [changed(each, change) for each in value]
    return change(value)


def escaped(text: str) -> str:
    """Write what a terminal would obey instead of showing it, in a text of a stranger, as `\\x1b`."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def as_json(value: Any, **layout: Any) -> str:
    """Write JSON, and null for what it cannot hold: a broken model's NaN, sums of numbers that a file made infinite."""
    finite = changed(value, lambda x: None if isinstance(x, float) and not math.isfinite(x) else x)
    return json.dumps(finite, allow_nan=False, **layout)
