"""train.py --rehearse of the ranks that REHEARSED names: to be forked, from a process that has computed nothing.

torch lets no child of a process compute gradients whose own threads have, and pytest's have.
"""

import os

import train
from pretraining.errors import one_line_errors
from pretraining.rehearsal import rehearsal

if __name__ == "__main__":
    rehearsal.rehearsed_ranks = lambda world_size: [int(rank) for rank in os.environ["REHEARSED"].split(",")]
    rehearsal.SAYS_EVERY_SECONDS = 0.5
    with one_line_errors():
        train.main()
