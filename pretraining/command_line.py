"""Define the flags that mean the same in every command of the repository, and commands of several verbs.

A verb is an object whose class has a docstring, whose first line is its help, and

    EXAMPLES                       command lines, shown by --help
    add_arguments(parser)          its options; --json is there already
    answer(options) -> dict        plain JSON values
    as_text(answer) -> str         the same for a person

It raises `UserError` for what a user can mend. If the answer itself may be a refusal, `refusal(answer)` returns its
line, which is shown after the answer, or None.
"""

import argparse
import inspect
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, NoReturn
from urllib.parse import unquote

from pretraining.errors import UserError, nearest
from pretraining.outside.addresses import refuse_credentials, refuse_slips
from pretraining.outside.masking import as_json
from pretraining.recipe.fixed_keys import check_allowed
from pretraining.recipe.recipe import SECTIONS
from pretraining.recipe.section import description_of
from pretraining.runtime.installation import WORKPLACE, as_typed

REHEARSED = ("here", "elsewhere")  # where the machine of a rehearsal is: among those of the run, or not
TRAIN_EXAMPLES = """examples:
  deepspeed --num_gpus=8 train.py --recipe 30b
  deepspeed --num_gpus=2 train.py --recipe tiny --deepspeed zero3 --output_dir runs/tiny-zero3
  torchrun --nproc_per_node=2 train.py --recipe tiny --set training.learning_rate=0.002
  accelerate launch --config_file accelerate_configs/zero2.yaml train.py --recipe tiny
  torchrun --nproc_per_node=8 train.py --recipe my_recipe.json --while_preparing
  python train.py --recipe 7b --plan --world_size 8 --gpu H100
  python train.py --recipe 30b --rehearse --world_size 1024 --nodes 128 --gpu H100

The same command continues a run that was stopped or killed; --resume never starts over."""


class OneLineParser(argparse.ArgumentParser):
    """Report errors in one line, as every other error of the repository, and take no credentials."""

    def __init__(self, *words: Any, **options: Any) -> None:
        # descriptions and examples keep their lines
        super().__init__(*words, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, once no word holds a credential: words reach logs, recipes and manifests."""
        words = sys.argv[1:] if args is None else list(args)
        for before, word in zip([self.prog, *words], words, strict=False):
            refuse_credentials(word, before if before.startswith("-") else self.prog)
        return super().parse_known_args(words, namespace)

    def format_help(self) -> str:
        return as_typed(super().format_help())

    def error(self, message: str) -> NoReturn:
        near = ""
        if unknown := re.fullmatch(r"unrecognized arguments: (--[\w-]+).*", message, re.DOTALL):
            near = nearest(unknown[1], re.findall(r"--[\w-]+", self.format_usage()))
        raise UserError(f"{message}{near} (see {self.prog} --help)")


def add_recipe_arguments(parser: argparse.ArgumentParser, remote_data: bool = False) -> None:
    """Add `--recipe`, `--set`, `--limit_tokens`, `--data_dir`. remote_data: that may be an address, with a cache."""
    add = parser.add_argument
    add("--recipe", required=True, metavar="NAME|PATH", help="a file of recipes/, or a path")
    what = "change one value of the recipe (repeatable); docs/recipe_keys.md lists all keys"
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=what)
    what = "try the recipe on so many tokens, as 5e6: smaller steps and all else in proportion, with data and a run "
    what += "of its own; data_prep.py and train.py take the same"
    add("--limit_tokens", type=number_of_tokens, metavar="N", help=what)
    if remote_data:
        add_data_source(parser)
    else:
        what = "prepared data (default: data/)"
        add("--data_dir", type=_local_folder, default=WORKPLACE / "data", metavar="DIR", help=what)


def quoted_words(text: str) -> str:
    """Return the words of a command as they were typed; refuse a quote that is not closed."""
    try:
        shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {str(error).lower()}") from error
    return text


def add_launcher(parser: argparse.ArgumentParser) -> None:
    """Add `--launcher` of a command that starts runs."""
    what = 'what starts the ranks: "deepspeed --num_gpus=8"'
    parser.add_argument("--launcher", type=quoted_words, default="", metavar="WORDS", help=what)


def add_deepspeed(parser: argparse.ArgumentParser) -> None:
    """Add `--deepspeed`."""
    what = "a file of ds_configs/ over the recipe's"
    parser.add_argument("--deepspeed", type=_not_empty, metavar="NAME|PATH", help=what)


def add_resuming_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--resume` and `--allow_change` of a command that continues runs."""
    what = "continue from the newest committed checkpoint (default), start over, or from this one"
    parser.add_argument("--resume", type=_not_empty, default="auto", metavar="auto|never|PATH|URL", help=what)
    what = "go on although this part of the recipe is not what the run began with (repeatable; recorded)"
    allowed = {"type": _part_of_the_curve, "default": [], "metavar": "SECTION.KEY"}
    parser.add_argument("--allow_change", action="append", help=what, **allowed)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add `--trust_extensions` of a command that may run the code in a run folder."""
    what = "run the Python code in the run's folder (its model, its metrics), which it asks for"
    parser.add_argument("--trust_extensions", action="store_true", help=what)


def add_data_source(parser: argparse.ArgumentParser) -> None:
    """Add `--data_dir` of a command that reads prepared data, with `--data_cache` and `--data_cache_gb`."""
    add = parser.add_argument
    what = "prepared data: a folder (default: data/), or an address as s3://bucket/data, gs://, "
    what += "hf://, https://"
    add("--data_dir", type=_folder_or_address, default=WORKPLACE / "data", metavar="DIR|URL", help=what)
    what = "with a --data_dir that is an address: keeps fetched shards (default: $PRETRAINING_DATA_CACHE or "
    what += "~/.cache/pretraining/data)"
    add("--data_cache", type=Path, metavar="DIR", help=what)
    what = "the most its shards take (default: $PRETRAINING_DATA_CACHE_GB or half of the disk's free room)"
    add("--data_cache_gb", type=positive_number, metavar="GB", help=what)


def _not_empty(text: str) -> str:
    # An unset variable of the shell gives an empty one, and Path("") would be the current folder.
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; name a folder, or leave the option out")
    return text


def named_path(text: str) -> Path:
    return Path(_not_empty(text))


def _folder_or_address(text: str) -> Path | str:
    """Return a Path for a local folder (file:// too), a str for any other address."""
    refuse_slips(_not_empty(text), "--data_dir")
    if text.startswith("file://"):
        # an address writes a space as %20, a path does not
        return Path(unquote(text.removeprefix("file://")))
    return text.rstrip("/") if "://" in text else Path(text)


def _local_folder(text: str) -> Path:
    if isinstance(address := _folder_or_address(text), str):
        what = f"{text} is not a local folder; prepare into one, then copy it there"
        raise argparse.ArgumentTypeError(what)
    return address


def parse_train_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the arguments of train.py; those that launchers add (`--local_rank`) are accepted and ignored.

    `world_size` is the number of processes that the launcher started. With --plan or --rehearse it is the number asked
    for; with --plan it may be None.
    """
    sections = ["sections of a recipe, beside model and training:"]
    for name, section in SECTIONS.items():
        indents = {"initial_indent": f"  {name:<13}", "subsequent_indent": " " * 15}
        sections += wrap(description_of(section), 100, **indents)
    what = "Pretrain a causal language model from a recipe."
    epilog = "\n".join([*sections, "", TRAIN_EXAMPLES])
    parser = OneLineParser("train.py", description=what, epilog=epilog, allow_abbrev=False)
    add_recipe_arguments(parser, remote_data=True)
    add = parser.add_argument
    what = "a file of ds_configs/, or a path, over the recipe's, with degrees of parallelism after a colon if wanted "
    what += "(zero3:sequence=4); 'null' for plain data parallel"
    # `accelerate launch` puts the deepspeed_config_file of its config there
    by_accelerate = as_typed(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")) or None
    add("--deepspeed", type=_not_empty, metavar="NAME|PATH", default=by_accelerate, help=what)
    add("--output_dir", type=named_path, metavar="DIR", help="run folder (default: runs/<recipe>)")
    add_resuming_arguments(parser)
    what = "start data_prep.py's work too, and train on the text that is prepared so far; "
    what += "the curve is that of preparing first (the recipe needs data.shuffle_blocks)"
    add("--while_preparing", action="store_true", help=what)
    add("--plan", action="store_true", help="print what the run will need, and exit")
    what = "do the start of the run on so many ranks, without them and without GPUs, and exit; `elsewhere` if data "
    what += "and disks of the nodes are not seen from here"
    kinds = {"choices": REHEARSED, "const": REHEARSED[0], "metavar": "here|elsewhere"}
    add("--rehearse", nargs="?", help=what, **kinds)
    add("--json", action="store_true", help="with --plan or --rehearse: as JSON")
    what = "with --plan or --rehearse: number of processes"
    add("--world_size", type=positive_integer, metavar="N", help=what)
    what = "with --plan or --rehearse: nodes (default: as many GPUs each as the GPU's table says, or 8 processes)"
    add("--nodes", type=positive_integer, metavar="N", help=what)
    add("--gpu", metavar="NAME", help="with --plan or --rehearse: the kind of GPU, as H100 or A100-40GB")
    add("--force", action="store_true", help="go on where the plan says that the run does not fit")
    # The deepspeed launcher adds it to the command; the rank is read from the environment.
    add("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    planned = options.plan or options.rehearse
    # without a plan or a rehearsal, a run would begin that nobody asked for
    if options.plan and options.rehearse:
        raise UserError("--plan and --rehearse are two questions: ask one, then the other")
    for name in ("json", "world_size", "gpu", "nodes"):
        if getattr(options, name) not in (None, False) and not planned:
            raise UserError(f"--{name} goes with --plan: add that, or leave --{name} out")
    if options.rehearse and options.world_size is None:
        raise UserError("--rehearse needs --world_size N, the number of processes of the run")
    if options.nodes is not None and options.nodes > (options.world_size or 1):
        raise UserError(f"--nodes {options.nodes}: give --world_size N with it, and at most N nodes")
    if options.rehearse and options.while_preparing:
        raise UserError("--rehearse looks at finished data: leave --while_preparing out, or prepare first")
    if options.rehearse and options.resume not in ("auto", "never"):
        raise UserError("--rehearse begins at the start of a run: leave --resume PATH out")
    if not planned:
        options.world_size = world_size_here()  # the launcher decides: its number may not be overridden
    return options


def started_by_launcher() -> bool:
    """Return whether a launcher started this process; `UserError` if its variables are incomplete or no ranks."""
    if "WORLD_SIZE" not in os.environ:
        return False
    others = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in others if name not in os.environ]:
        what = f"WORLD_SIZE is set without {', '.join(missing)}: use a launcher, or unset WORLD_SIZE"
        raise UserError(what)
    ranks, rank = world_size_here(), _number_of("RANK", least=0)
    if rank >= ranks:
        raise UserError(f"RANK={rank} is no rank of WORLD_SIZE={ranks}: they count from 0; use a launcher")
    return True


def world_size_here() -> int:
    """Return the number of processes that the launcher started, 1 without a launcher."""
    return _number_of("WORLD_SIZE", least=1)


def on_one_node() -> bool:
    return world_size_here() == ranks_here()


def ranks_here() -> int:
    # torchrun and accelerate set LOCAL_WORLD_SIZE, deepspeed sets LOCAL_SIZE.
    return _number_of("LOCAL_WORLD_SIZE" if os.environ.get("LOCAL_WORLD_SIZE") else "LOCAL_SIZE", least=1)


def _number_of(variable: str, least: int) -> int:
    """Read the number in a variable of the environment, 1 if it is unset or empty."""
    text = os.environ.get(variable) or "1"
    try:
        return _whole_number(least, text)
    except argparse.ArgumentTypeError:
        what = f"{variable}={text}: is not a whole number of at least {least}; use a launcher, or unset it"
        raise UserError(what) from None


def _part_of_the_curve(text: str) -> str:
    try:
        return check_allowed(text)
    except UserError as error:
        # argparse adds the name of the option to an error of this class
        raise argparse.ArgumentTypeError(str(error)) from None


def _whole_number(least: int, text: str) -> int:
    # isdigit alone is true of digits such as a superscript 2, which int() refuses
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def _number(is_right: Callable[[float], bool], wanted: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    # comparisons are false for NaN, which stands for a text that is no number too
    if not is_right(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return number


# what reads an argument
positive_integer = partial(_whole_number, 1)
not_negative_integer = partial(_whole_number, 0)
not_negative_number = partial(_number, lambda number: 0 <= number < math.inf, "a number of at least 0")
positive_number = partial(_number, lambda number: 0 < number < math.inf, "a number above 0")


def number_of_tokens(text: str) -> int:
    """Read an argument that is a whole number of at least 1, which may be written 5e6 or 5_000_000."""
    wanted = "a whole number of at least 1, as 5e6"
    return int(_number(lambda number: 1 <= number < math.inf and number == int(number), wanted, text))


def answer_one(
    prog: str, verbs: Mapping[str, Any], description: str, epilog: str, arguments: list[str] | None = None
) -> None:
    """Answer one command line on stdout; then raise `UserError` if the answer is a refusal."""
    # no abbreviations: a new option would change what an old command means
    parser = OneLineParser(prog, description=description, epilog=epilog, allow_abbrev=False)
    parsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in verbs.items():
        text, examples = inspect.getdoc(verb) or "", f"examples:\n{verb.EXAMPLES}"
        first_line = text.splitlines()[0]
        shown = {"help": first_line, "description": text, "epilog": examples}
        of_verb = parsers.add_parser(name, **shown, allow_abbrev=False)
        verb.add_arguments(of_verb)
        of_verb.add_argument("--json", action="store_true", help="the answer as JSON")
    options = parser.parse_args(arguments)
    verb = verbs[options.verb]
    answer = verb.answer(options)
    print(as_json(answer, indent=2) if options.json else verb.as_text(answer), flush=True)
    # after the answer, because it explains the refusal
    refusal = verb.refusal(answer) if hasattr(verb, "refusal") else None
    if refusal:
        raise UserError(refusal)
