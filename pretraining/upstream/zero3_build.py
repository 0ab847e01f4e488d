"""Building a model under ZeRO-3 without transformers' own draw of the weights; transformers 5.23.

Inside `no_init_weights` no weight is drawn at the other stages, but under ZeRO-3 `PreTrainedModel._from_config` gathers
every module once more and draws all the same (`initialize_weights_zero3`). We draw them ourselves, or load them: at 30b
that pass is seconds of communication for nothing. Held by tests/test_model.py; it may go once
`no_init_weights` counts there too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.integrations import deepspeed


@contextmanager
def no_zero3_draw() -> Iterator[None]:
    """Leave weights as `zero.Init` has cut them up."""
    # transformers imports it from this module at each call.
    draw = deepspeed.initialize_weights_zero3
    deepspeed.initialize_weights_zero3 = lambda model: None
    try:
        yield
    finally:
        deepspeed.initialize_weights_zero3 = draw
