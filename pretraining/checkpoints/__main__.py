"""What one does with the checkpoints of a run: look at them, verify, branch a decay off, reshard, export, make room."""

import sys

from pretraining import command_line as commands
from pretraining.checkpoints import verbs
from pretraining.errors import one_line_errors

EPILOG = """examples:
  python -m pretraining.checkpoints list runs/tiny
  python -m pretraining.checkpoints verify runs/tiny
  python -m pretraining.checkpoints export runs/tiny --step 750
  python -m pretraining.checkpoints branch runs/qk-norm --at 8000 --decay 1-sqrt --steps 2000
  python -m pretraining.checkpoints prune runs/tiny --keep_last 1 --yes

Every verb has --help, and --json for scripts."""


def main(arguments: list[str] | None = None) -> None:
    """Do one thing; its answer goes to stdout."""
    modules = commands.verb_modules(verbs)
    commands.answer_one("python -m pretraining.checkpoints", modules, __doc__, EPILOG, arguments)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
