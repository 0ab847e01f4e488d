"""Name the reason when a checkpoint or an export cannot be written: the libraries' own messages hide a full disk."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretraining.errors import UserError, file_error
from pretraining.planning.quantities import num_bytes

# torch's zip writer (RuntimeError), and the Rust libraries safetensors and tokenizers.
_TORCH_WRITER = re.compile(r"PytorchStreamWriter failed|unexpected pos \d+ vs")

_RUST_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def one_line_disk_errors(folder: Path) -> Iterator[None]:
    """Raise a `UserError` in place of what the libraries raise if `folder` cannot be written.

    The next start removes the incomplete checkpoints that a full disk has left.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (refusal := _disk_error(error, folder)) is None:
            raise
        raise refusal from error


def _disk_error(error: Exception, folder: Path) -> UserError | None:
    # Before the general OSError: "no such file" alone would not say that somebody moved the folder.
    if isinstance(error, FileNotFoundError) and not folder.exists():
        return UserError(
            f"{folder}: was removed or renamed while the run wrote there; what is gone cannot be continued, and a "
            "renamed folder is continued with --output_dir",
            on_every_rank=False,
        )
    if isinstance(error, OSError) and error.errno is not None:
        return file_error(error, folder)
    # The Rust libraries raise errors of their own classes, with the number only in the text.
    if found := _RUST_ERROR.search(str(error)):
        return file_error(OSError(int(found[1]), os.strerror(int(found[1]))), folder)
    if isinstance(error, RuntimeError) and _TORCH_WRITER.search(str(error)):
        return _failed_write(folder)
    return None


def _failed_write(folder: Path) -> UserError:
    """Find the reason by the free space of the disk."""
    # torch's writer does not keep the errno.
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < 1e6:
        return file_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder)
    return UserError(
        f"{folder}: a checkpoint could not be written ({num_bytes(free_bytes)} are free there: a quota, or a "
        "disk that failed); then type the same command again: it continues from the checkpoint before",
        on_every_rank=False,
    )
