"""The progress bars of lm-eval's tasks; lm_eval 0.4.13.

Each rank shows one while it builds the requests of a task, and there is no setting against it: `tqdm` of
`lm_eval.api.task` is replaced. Held by test_upstream.py; may go once lm-eval shows bars on rank 0 alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_task_bars() -> Iterator[None]:
    """Build requests without a bar in the `with` block."""
    from lm_eval.api import task  # optional: only a recipe with tasks needs it

    shown, task.tqdm = task.tqdm, lambda items, **_: items
    try:
        yield
    finally:
        task.tqdm = shown
