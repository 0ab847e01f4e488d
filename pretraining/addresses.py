"""Check and mask addresses of stores (`s3://bucket/runs`): neither they nor messages may hold a credential."""

import os
import re
from collections.abc import Collection

from pretraining.errors import UserError

_PASSWORD = re.compile(r"://[^/@\s:]*:[^@\s]*@")
# a parameter of the query, such as &sig=...: its name is kept (group 1), its value is not
_SIGNED = re.compile(
    r"([?&][^=&\s]*(?:sig|token|key|secret|password|credential)[^=&\s]*=)[^&\s'\")]+", re.IGNORECASE
)
# parts of names such as AWS_SECRET_ACCESS_KEY and HF_TOKEN
_SECRET_VARIABLE = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION_STRING|SAS")
_SLIPPED = re.compile(r"(s3|gs|gcs|hf|az|abfss?|https?)(?::/?|/)/?(?=[^/])", re.IGNORECASE)
"""The beginning of an address with a slip: s3:/bucket, s3//bucket, gs:bucket. A folder may be called s3/bucket."""
_SHORTEST_SECRET = 8
"""Characters. A shorter value may be an everyday word."""


def is_remote(address: object) -> bool:
    """Say if `address` names a store (`s3://`, `gs://`, `hf://`, `https://`) rather than a path of this machine."""
    return isinstance(address, str) and "://" in address


def refuse_credentials(address: str, key: str) -> None:
    """Raise `UserError` if an address holds a password or a signature, which the message does not repeat.

    key: what holds the address, for the message: `checkpoints.upload`, `--resume`.
    """
    if _PASSWORD.search(address) or _SIGNED.search(address):
        raise UserError(
            f"{key}: {masked(address)} holds a credential, which would reach files and logs; leave it out and set "
            "the store's own variables (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, HF_TOKEN, ...)"
        )


def refuse_slips(address: str, key: str) -> None:
    """Raise `UserError` for an address with a slip, such as `s3//bucket`, which would be a folder of this machine.

    Also for `memory://`, which fsspec would take: nothing there outlives its process.
    key: what holds the address, for the message.
    """
    if address.rstrip("/").endswith(":"):
        raise UserError(f"{key}: {address} names no place; write s3://bucket/folder, or the path of a folder")
    if address.startswith("memory://"):
        raise UserError(
            f"{key}: {address} is lost when its process ends; name a store, or a folder on a disk"
        )
    slip = _SLIPPED.match(address)
    if slip and not is_remote(address) and slip[0] != f"{slip[1]}/":
        meant = f"{slip[1]}://{address[slip.end() :]}"
        raise UserError(f"{key}: {address} is no address; write {meant}, or ./{address} for a folder here")


def masked(text: str, variables: Collection[str] = ()) -> str:
    """Write `***` for passwords in addresses, for signatures, and for the values of variables that hold secrets.

    variables: names of more variables that hold a secret.
    """
    text = _SIGNED.sub(r"\1***", _PASSWORD.sub("://***@", text))
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and (name in variables or _SECRET_VARIABLE.search(name.upper())):
            text = text.replace(value, "***")
    return text
