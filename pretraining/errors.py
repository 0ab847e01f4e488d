"""Define one family of errors: what a user can cause is one line on stderr and exit code 2."""

import errno
import importlib
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from pretraining.outside.masking import escaped, masked
from pretraining.runtime.exit_codes import FINISHED, GAVE_UP, INTERRUPTED, USER_ERROR, tell_exit_code
from pretraining.runtime.imports import silence_libraries
from pretraining.runtime.installation import as_typed

_REMEDIES = {
    "free some space, then type the same command again: what is complete is kept": "ENOSPC EDQUOT",
    "choose a folder that can be written (--output_dir, --data_dir)": "EROFS",
    "have it allowed to you, or choose another folder (--output_dir, --data_dir)": "EACCES EPERM",
    "choose another path, or move what lies there": "ENOTDIR EISDIR EEXIST ELOOP ENXIO",
    "choose a shorter name": "ENAMETOOLONG",
    "the disk failed; type the same command again once it is back": "EIO ESTALE",
    "allow larger files (ulimit -f), or choose a disk that takes them": "EFBIG",
    "allow more open files (ulimit -n)": "EMFILE",
    "end programs of this machine that hold many files open": "ENFILE",
    "take fewer processes at once, allow more memory (ulimit -v), or use a machine that has more": "ENOMEM",
}
FILE_ERRORS = {getattr(errno, name): what for what, names in _REMEDIES.items() for name in names.split()}
"""{error of files or memory that a user can cause: how to mend it}; any other is a bug of ours."""

SILENT_SECONDS = 3
"""How long ranks that print nothing wait before they leave. A launcher ends all ranks when one leaves, so the one that
prints must be the first."""


USER_CODE: set[str] = set()  # files and folders of extensions, in which errors are the user's to mend

_KEYS: dict[str, str] = {}  # {section: the recipe that was read last}, for messages that know the key alone


def place_keys(sections: Iterable[str], where: str) -> None:
    """Have lines of errors that begin with a key of these sections begin with the file `where`."""
    _KEYS.update(dict.fromkeys(sections, where))


class UserError(Exception):
    """What the user can mend: one line says what, where, and what to do. on_every_rank: rank 0 alone reports it."""

    exit_code = USER_ERROR

    def __init__(self, message: str, on_every_rank: bool = True):
        # texts of other libraries may hold line breaks, and a value in a recipe may be a book
        words = (cut(word, 500) for word in as_typed(message).split())
        super().__init__(cut(" ".join(words), 3000))
        self.on_every_rank = on_every_rank

    def __str__(self) -> str:
        """Return the line as it may be shown anywhere, whatever it repeats of a file or of a command."""
        return escaped(masked(super().__str__()))


class Interrupted(UserError):
    exit_code = INTERRUPTED


class GaveUp(UserError):
    """The loss left its course and the recipe's policy allows no further attempt."""

    exit_code = GAVE_UP


@contextmanager
def one_line_errors(after_interrupt: str = "") -> Iterator[None]:
    """Turn a `UserError`, or a file that cannot be used, into one line on stderr and exit code 2; Ctrl-C into 130.

    Every command runs inside it: it also hides messages of the libraries that are of no use to a user.
    after_interrupt: what happens to the work that Ctrl-C ends.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a sample or a name that this terminal cannot show
    silence_libraries()
    try:
        # Libraries in Rust take UTF-8 only. In an ASCII locale Python passes other bytes on as lone surrogates.
        for text in (*sys.argv, str(Path.cwd()), str(Path(__file__).resolve())):
            try:
                text.encode()
            except UnicodeEncodeError:
                shown = os.fsencode(text).decode(errors="replace")
                shown = shown.encode("ascii", "backslashreplace").decode()
                what = f"{shown}: not a name in this locale; set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
                raise UserError(what) from None
        yield
        # the exit code is one file of this machine (`supervise`): one rank writes it
        if os.environ.get("LOCAL_RANK", "0") == "0":
            tell_exit_code(FINISHED)
    except UserError as error:
        _leave(error)
    except KeyboardInterrupt:
        exec("")  # else CPython 3.11 ends by SIGINT where the interrupt came through an exec()
        _leave(Interrupted("interrupted" + (f"; {after_interrupt}" if after_interrupt else "")))
    except BrokenPipeError:
        # Whoever read the output has seen enough (`| head`); Python's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # 128 + SIGPIPE, as the shell reports a command that a closed pipe ends
    except Exception as error:
        # after BrokenPipeError, which is an OSError too
        told = fault_in_user_code(error) or file_error(error)
        if told is None:
            traces = traceback.format_exception
            sys.excepthook = lambda *error: sys.stderr.write(masked("".join(traces(*error))))
            raise
        if os.environ.get("RANK", "0") != "0":
            time.sleep(SILENT_SECONDS)  # if rank 0 meets the same error, its line is the only one
        _leave(told)


def fault_in_user_code(error: BaseException) -> UserError | None:
    """Return the `UserError` that names file and line of an exception in an extension; None if it is not from one."""
    if not USER_CODE:
        return None
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if USER_CODE & {str(file), *map(str, file.parents)}:
            what = f"{type(error).__name__}: {error}"
            return UserError(f"{frame.filename}: line {frame.lineno}: {what}; mend the extension", False)
    return None


def file_error(error: BaseException, folder: Path | None = None) -> UserError | None:
    """Return the `UserError` of a file, disk or memory that fails; None: a bug of ours. folder: if no file is named."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    if not isinstance(error, OSError | MemoryError) or number not in FILE_ERRORS:
        return None
    where = getattr(error, "filename", None) or folder
    place = f"{os.fspath(where)}: " if isinstance(where, str | os.PathLike) else ""
    reason = getattr(error, "strerror", None) or os.strerror(number)
    # a disk may fail on one node alone: each rank reports its own
    return UserError(f"{place}{reason}; {FILE_ERRORS[number]}", on_every_rank=False)


def _leave(error: UserError) -> None:
    """Report the error, on rank 0 only if all ranks meet it, and end the process with its exit code."""
    if os.environ.get("RANK", "0") == "0" or not error.on_every_rank:
        line = str(error)
        key, colon, _ = line.partition(": ")
        # a line that begins with a dotted key: the recipe's file comes before it
        file = _KEYS.get(key.partition(".")[0])
        # a file may be called data.json
        placed = f"{file}: {line}" if colon and file and not Path(key).exists() else line
        print(f"error: {placed}", file=sys.stderr, flush=True)
    else:
        time.sleep(SILENT_SECONDS)
    sys.stdout.flush()
    tell_exit_code(error.exit_code)
    # The other ranks may wait in a collective that will never complete: do not join them at exit.
    os._exit(error.exit_code) if "WORLD_SIZE" in os.environ else sys.exit(error.exit_code)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, of 200 characters at most, without secrets; its class if it says nothing."""
    return masked(str(error).strip().partition("\n")[0])[:200] or type(error).__name__


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


def nearest(word: str, candidates: Iterable[str], most: int = 1) -> str:
    """Suggest the candidates closest to `word`: `; did you mean 'x', 'y' or 'z'?`, or an empty string."""
    # without an option's dashes, which are alike in all of them
    word, names = word.lstrip("-"), {name.lstrip("-"): name for name in candidates}
    close = get_close_matches(word, names, n=most, cutoff=0.6) or abbreviated(word, names)
    # adam is no slip of adalomo, but the beginning of adamw_torch
    begun = [name for name in names if len(word) > 2 and name.startswith(word)]
    if begun and not set(begun) & set(close):
        close = begun
    return did_you_mean([names[name] for name in close[:most]])


def abbreviated(word: str, names: Iterable[str]) -> list[str]:
    """Find the names that `word` is short for, as `lr` and `learn_rate` for learning_rate."""
    parts, names = re.findall(r"[a-z0-9]+", word.lower()), list(names)
    initials = {name: "".join(re.findall(r"(?:^|_)(\w)", name)) for name in names if "_" in name}
    by_initials = [name for name, first in initials.items() if first == word.lower()]
    # two letters begin too many names
    if by_initials or max(map(len, parts), default=0) < 3:
        return by_initials
    found = []
    for name in names:
        words = name.lower().split("_")
        starts = range(len(words) - len(parts) + 1)
        # the parts are the beginnings of words that follow each other
        if any(all(map(str.startswith, words[start:], parts)) for start in starts):
            found.append(name)
    return found


def did_you_mean(names: list[str]) -> str:
    """Write `; did you mean 'x', 'y' or 'z'?`, or an empty string for no names."""
    quoted = [repr(name) for name in names]
    if not quoted:
        return ""
    return f"; did you mean {' or '.join(filter(None, [', '.join(quoted[:-1]), quoted[-1]]))}?"


def require(package: str, purpose: str) -> ModuleType:
    """Import `package`; if it is missing, a UserError says which purpose needs it and how to install it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        # The package may be there, and one that it imports missing.
        missing = error.name or package
        what = f"{purpose} needs the package {missing!r}, which is not installed: pip install {missing}"
        raise UserError(what) from error
