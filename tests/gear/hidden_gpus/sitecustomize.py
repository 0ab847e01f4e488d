"""Python imports this when it starts, if this folder is on its path: no GPU is seen, whatever started the process.

The `deepspeed` launcher sets the variable anew for the ranks it starts (deepspeed 0.19.8, launcher/launch.py).
"""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""

if _pipe := os.environ.get("PRETRAINING_TEST_FORKS"):
    import forked_program

    if _words := forked_program.words_of_program():
        forked_program.run(_pipe, _words)
