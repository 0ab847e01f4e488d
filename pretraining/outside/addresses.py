"""Check addresses of stores (`s3://bucket/runs`): none may hold a credential."""

import re

from pretraining.errors import UserError
from pretraining.outside.masking import without_credentials

_SLIPPED = re.compile(r"(s3|gs|gcs|hf|az|abfss?|https?)(?::/?|/)/?(?=[^/])", re.IGNORECASE)
"""The beginning of an address with a slip: s3:/bucket, s3//bucket, gs:bucket. A folder may be called s3/bucket."""


def is_remote(address: object) -> bool:
    """Return whether `address` names a store (`s3://`, `hf://`, `https://`) rather than a path of this machine."""
    return isinstance(address, str) and "://" in address


def hub_repository(address: str) -> str | None:
    """Return the hub's repository in an address, such as `datasets/owner/name`; None for other addresses.

    Each write to it is a commit, which stays. Buckets (`hf://buckets/...`) have no commits.
    """
    if not address.startswith("hf://") or address.startswith("hf://buckets/"):
        return None
    # hf://datasets/owner/name@revision/folder, hf://owner/name/file
    parts = address.removeprefix("hf://").partition("@")[0].split("/")
    return "/".join(parts[: 3 if parts[0] in ("datasets", "spaces") else 2])


def refuse_credentials(value: object, where: str, key: str = "") -> None:
    """Raise `UserError` if a text of a JSON value holds a password, a signature or a token, and do not repeat it.

    where: what holds it, for the message: a recipe's file, `--resume`. key: the dotted key of `value` inside it.
    """
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in inner:
            refuse_credentials(each, where, f"{key}.{name}" if key else str(name))
    elif isinstance(value, str) and without_credentials(value) != value:
        raise UserError(
            f"{where}: {f'{key}: ' if key else ''}{value} holds a credential, which would reach files and logs; leave "
            "it out and set the store's own variables (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, HF_TOKEN, ...)"
        )


def slip_in(address: str) -> str | None:
    """Return what is wrong with an address such as `s3//bucket`, which would be a folder of this machine.

    Also with `memory://`, which fsspec would take: nothing there outlives its process. None: nothing is wrong.
    """
    if address.rstrip("/").endswith(":"):
        return f"{address} names no place; write s3://bucket/folder, or the path of a folder"
    if address.startswith("memory://"):
        return f"{address} is lost when its process ends; name a store, or a folder on a disk"
    slip = _SLIPPED.match(address)
    if slip and not is_remote(address) and slip[0] != f"{slip[1]}/":
        meant = f"{slip[1]}://{address[slip.end() :]}"
        return f"{address} is no address; write {meant}, or ./{address} for a folder here"
    return None


def refuse_slips(address: str, key: str) -> None:
    if slip := slip_in(address):
        raise UserError(f"{key}: {slip}")
