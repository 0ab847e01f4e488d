"""The progress bars of lm-eval's tasks; lm_eval 0.4.13.

Each rank shows one while it builds the requests of a task, and there is no setting against it: `tqdm` of
`lm_eval.api.task` is replaced. Held by test_upstream.py; may go once lm-eval shows bars on rank 0 alone.
"""

from contextlib import AbstractContextManager
from unittest import mock


def no_task_bars() -> AbstractContextManager:
    from lm_eval.api import task  # optional: only a recipe with tasks needs it

    return mock.patch.object(task, "tqdm", lambda items, **_: items)
