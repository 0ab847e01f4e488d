"""The nearest semi-orthogonal matrix, by Newton-Schulz iterations, for many matrices at once."""

from collections import defaultdict
from collections.abc import Sequence

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic: steepest at zero, so that small singular values come near 1 in five iterations (Jordan 2024)."""
SMALLEST_NORM = 1e-7


def orthogonalize(matrices: torch.Tensor, num_steps: int = 5) -> torch.Tensor:
    """[n, rows, columns] to as many matrices whose singular values all lie near 1.

    X <- a X + b (X X^T) X + c (X X^T)^2 X after X / |X|_F, on the side where X X^T is smaller; in bf16 on a GPU
    (the caller's dtype), which the iteration is stable in.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(SMALLEST_NORM)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalize_all(batches: Sequence[torch.Tensor], num_steps: int = 5) -> list[torch.Tensor]:
    """The same for batches of various shapes; matrices of one shape go through together."""
    alike = defaultdict(list)
    for number, batch in enumerate(batches):
        alike[tuple(sorted(batch.shape[1:]))].append(number)
    found: list[torch.Tensor | None] = [None] * len(batches)
    for numbers in alike.values():
        tall = [batches[n].shape[1] > batches[n].shape[2] for n in numbers]
        wide = [batches[n].mT if flip else batches[n] for n, flip in zip(numbers, tall, strict=True)]
        results = orthogonalize(torch.cat(wide), num_steps).split([len(batch) for batch in wide])
        for number, flip, result in zip(numbers, tall, results, strict=True):
            found[number] = result.mT if flip else result
    return found
