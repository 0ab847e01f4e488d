"""What callbacks may hear beyond the Trainer's own events.

`hear_gradient_norm(norm)`: the global gradient norm of each step, before clipping; None where nobody knows it.
`hear_sources(sources)`: [batch] numbers of the sources that the next micro-batch is from, before its forward pass.
"""

from collections.abc import Iterable

from transformers import TrainerCallback


def tell(callbacks: Iterable[TrainerCallback], method: str, value) -> None:
    """Call `method` of those that have it."""
    for callback in callbacks:
        hear = getattr(callback, method, None)
        if hear is not None:
            hear(value)
