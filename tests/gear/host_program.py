"""What `deepspeed --hostfile` starts in place of train.py: each process writes what it has, and waits for its end.

    tests/gear/host_program.py FOLDER

A supervisor's request to stop ends it with 75, `FOLDER/end` with 0.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

from pretraining.runtime.exit_codes import STOPPED, supervisor_file, tell_exit_code

VARIABLES = ("RANK", "WORLD_SIZE", "PRETRAINING_RESTART", "OF_THE_USER", "PYTHONPATH")


def main(folder: Path) -> int:
    host, start = socket.gethostname(), os.environ.get("PRETRAINING_RESTART", "alone")
    found = {name: os.environ.get(name) for name in VARIABLES}
    written = folder / f"{start}-{host}-{found['RANK']}"
    part = folder / f".{written.name}"
    part.write_text(json.dumps({**found, "words": sys.argv[2:]}))
    part.rename(written)
    while not (folder / "end").exists():
        stop = supervisor_file("STOP")
        if stop is not None and stop.exists():
            tell_exit_code(STOPPED)
            return STOPPED
        time.sleep(0.05)
    return 0


if __name__ == "__main__":
    # DeepSpeed adds --local_rank before the words
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    sys.argv = [sys.argv[0], *words]
    sys.exit(main(Path(words[0])))
