"""Log-probabilities of continuations: shared out over the ranks, the same on every rank and at any world size."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from pretraining.evaluation.sample import evaluation_mode
from pretraining.runtime.process_group import rank_and_world_size


class Pair(NamedTuple):
    """A text of two parts, the second of which is scored."""

    context: list[int]
    """Tokens, at least one."""
    continuation: list[int]


class Score(NamedTuple):
    """Of one continuation."""

    log_probability: float
    """In nats, summed over the tokens of the continuation."""
    is_greedy: bool
    """Whether each of them was the likeliest one."""


class Interrupted(Exception):
    """The run is asked to stop: what was being measured has no result."""


@torch.no_grad()
def score(
    model: torch.nn.Module,
    pairs: Sequence[Pair],
    max_length: int,
    batch_size: int,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[Score]:
    """The score of each pair, on every rank; all ranks must call it with the same pairs.

    max_length: tokens that the model reads at once; of a longer text the last ones are read. interrupted: asked
    before every round of one batch a rank, must answer alike on all ranks.

    Pairs of like length share a batch, longest first, whatever the world size. Ranks that run out repeat the
    shortest batch unheard, because under ZeRO-3 a forward pass is a collective. Raises `Interrupted`.
    """
    rank, world_size = rank_and_world_size()
    batches = _batches(pairs, batch_size)
    scores = torch.zeros(len(pairs), 2, dtype=torch.float64, device=next(model.parameters()).device)
    with evaluation_mode(model):
        for round_start in range(0, len(batches), world_size):
            if interrupted():
                raise Interrupted
            number = round_start + rank
            batch = batches[min(number, len(batches) - 1)]
            found = _score_batch(model, [pairs[index] for index in batch], max_length)
            if number < len(batches):
                scores.index_copy_(0, _on(scores.device, batch), found)
    if world_size > 1:
        dist.all_reduce(scores)
    return [Score(nats, greedy == 1.0) for nats, greedy in scores.tolist()]


def _batches(pairs: Sequence[Pair], batch_size: int) -> list[list[int]]:
    """Numbers of the pairs of every forward pass."""
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i].context) - len(pairs[i].continuation))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def _score_batch(model, pairs: Sequence[Pair], max_length: int) -> torch.Tensor:
    """[pairs, 2], fp64: log-probability and 1 where all tokens are the likeliest.

    Rows are filled up on the right, where a causal model's earlier positions do not see it.
    """
    device = next(model.parameters()).device
    texts = [(pair.context + pair.continuation)[-(max_length + 1) :] for pair in pairs]
    width = max(2, *map(len, texts)) - 1
    rows = [text[:-1] + [0] * (width + 1 - len(text)) for text in texts]
    logits = model(input_ids=_on(device, rows)).logits
    rows = zip(logits, texts, pairs, strict=True)
    return torch.stack([_score_row(row, text, len(pair.continuation)) for row, text, pair in rows])


def _score_row(logits: torch.Tensor, text: list[int], num_scored: int) -> torch.Tensor:
    """From logits [length, vocabulary] of `text` without its last token; its last `num_scored` tokens are scored."""
    targets = _on(logits.device, text[1:])[-num_scored:] if num_scored else []
    end = len(text) - 1
    logs = torch.log_softmax(logits[end - len(targets) : end].float(), -1)
    if not len(targets):
        return torch.tensor([0.0, 1.0], dtype=torch.float64, device=logits.device)
    chosen = logs.gather(1, targets[:, None]).double().sum()
    return torch.stack([chosen, (logs.argmax(-1) == targets).all().double()])


def _on(device: torch.device, numbers: list) -> torch.Tensor:
    """Integers on the device, which the host does not wait for."""
    return torch.tensor(numbers).to(device, non_blocking=True)
