"""Promise: nothing committed is lost. The short version of benchmarks/chaos.py."""

import os
import random

from tests.chaos import Chaos

KILLS = 12


def test_killed_at_random_moments_and_left_to_finish(workshop):
    """Weights, losses and validation of every run are those of the undisturbed one, to the last bit."""
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(10**6))
    print(f"to repeat these kills: CHAOS_SEED={seed}")
    counts = Chaos(workshop, seed).endure(KILLS)
    assert counts["kills"] == KILLS and counts["runs"] >= 1
