"""Slow ranks, named with their hosts: what each rank needs by itself, gathered at logging."""

import socket
import statistics

import torch
import torch.distributed as dist

from pretraining.runtime.process_group import rank_and_world_size

SLOW = 1.25
"""A rank is slow from this multiple of the median on ..."""
NOTABLE = 0.05
"""... where the difference is at least this share of a step ..."""
STEPS = 20
"""... over so many steps in a row."""


class Stragglers:
    """Compares the ranks' own seconds of a step: waiting for data and the forward passes.

    Every rank of a data-parallel step ends when the slowest does, so whole steps do not tell them apart; the backward
    pass holds the messages. Under ZeRO-3 the forward passes hold messages too: there only the data wait tells.
    """

    def __init__(self):
        _, self.world_size = rank_and_world_size()
        hosts = [socket.gethostname()] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(hosts, socket.gethostname())
        self.hosts = hosts
        self.slow_steps = [0] * self.world_size
        self.named: set[int] = set()

    def gather(self, values: list[float]) -> list[list[float]]:
        """[ranks, values] of every rank; a collective."""
        if self.world_size == 1:
            return [values]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        gathered = torch.empty(self.world_size * len(values), dtype=torch.float64, device=device)
        dist.all_gather_into_tensor(gathered, mine)
        return gathered.view(self.world_size, len(values)).tolist()

    def judge(self, own_seconds: list[float], step_seconds: float, steps: int) -> list[dict]:
        """Ranks that have just become slow, as {"rank", "host", "own_seconds", "median_seconds", "steps"}.

        own_seconds: of each rank, a step's mean over the `steps` steps since the last call.
        """
        median = statistics.median_low(own_seconds)
        found = []
        for rank, own in enumerate(own_seconds):
            slow = own > SLOW * median and own - median > NOTABLE * step_seconds
            self.slow_steps[rank] = self.slow_steps[rank] + steps if slow else 0
            if not slow:
                self.named.discard(rank)
            elif self.slow_steps[rank] >= STEPS and rank not in self.named:
                self.named.add(rank)
                found.append(self._words(rank, own, median))
        return found

    def _words(self, rank: int, own: float, median: float) -> dict:
        return {
            "rank": rank,
            "host": self.hosts[rank],
            "own_seconds": round(own, 6),
            "median_seconds": round(median, 6),
            "steps": self.slow_steps[rank],
        }
