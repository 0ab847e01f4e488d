"""Find the repository's files in a checkout or an installed wheel, and write its commands as they are typed there."""

import re
import runpy
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
IS_WHEEL = (PACKAGE / "repository").is_dir()
"""Whether this is an installed wheel, which brings the repository's files inside the package (pyproject.toml)."""
REPOSITORY = PACKAGE / "repository" if IS_WHEEL else PACKAGE.parent
"""Holds train.py, data_prep.py, recipes/, ds_configs/, launch/, docs/ and requirements. Nothing is written there."""
WORKPLACE = Path.cwd() if IS_WHEEL else REPOSITORY  # has data/ and runs/, unless an option says otherwise

MODULES = {"plan": "planning", "eval": "evaluation", "report": "reporting"}
"""Commands with another name than their module: `pretraining-plan` is `python -m pretraining.planning`."""

_LAUNCHED = r"((?:deepspeed|torchrun|accelerate launch)(?: -\S+(?: (?!-|train\.py)\S+)?)*) train\.py\b"
_FILE = re.compile(
    r"(?<![\w./-])(?:(?:accelerate_configs|docs|ds_configs|launch|recipes)/(?:[\w./-]*\w)?|requirements[\w-]*\.txt)"
)


def run_command() -> None:
    """Run the module that the script of an installation is named after."""
    name = Path(sys.argv[0]).stem.removeprefix("pretraining-")
    if name == "files":
        print(REPOSITORY)
    elif name == "data-prep":
        runpy.run_path(str(REPOSITORY / "data_prep.py"), run_name="__main__")
    else:
        module = MODULES.get(name, name.replace("-", "_"))
        runpy.run_module(f"pretraining.{module}", run_name="__main__", alter_sys=True)


def as_typed(text: str) -> str:
    """Return a text with the commands and files of the repository in it as they are typed here.

    In a checkout that is how they are written. A wheel has `pretraining-train` for `python train.py`,
    `deepspeed --module pretraining.train` for `deepspeed train.py`, and files of the repository by their whole path.
    """
    if not IS_WHEEL:
        return text
    text = re.sub(_LAUNCHED, r"\1 --module pretraining.train", text)
    text = re.sub(r"(?<![\w./-])(?:python )?train\.py\b", "pretraining-train", text)
    text = re.sub(r"(?<![\w./-])(?:python )?data_prep\.py\b", "pretraining-data-prep", text)

    def whole_path(found: re.Match) -> str:
        # a file of that name in the user's own folder is the one that is meant
        ours = (REPOSITORY / found[0]).exists() and not Path(found[0]).exists()
        return f"{REPOSITORY}/{found[0]}" if ours else found[0]

    return _FILE.sub(whole_path, text)
