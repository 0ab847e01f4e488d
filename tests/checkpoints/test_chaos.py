"""Promise: nothing committed is lost. The short version of benchmarks/chaos.py."""

import os
import random

from tests.gear.chaos import Chaos

KILLS = 8
OF_SEVERAL = (("zero2:sequence=2", 2), ("zero3", 2), ("null", 1))


def test_killed_at_random_moments_and_left_to_finish(workshop):
    """Weights, losses and validation of every run are those of the undisturbed one, to the last bit.

    It takes a start for each of the kills: fewer would seldom meet a save.
    """
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(10**6))
    print(f"to repeat these kills: CHAOS_SEED={seed}")
    counts = Chaos(workshop, seed).endure(KILLS)
    assert counts["kills"] == KILLS and counts["runs"] >= 1


def test_killed_and_continued_at_other_layouts(workshop):
    """Its end is within 1e-4 of the undisturbed run's."""
    chaos = Chaos(workshop, 4, OF_SEVERAL, settings=("monitors.noise_scale_steps=null",))
    counts = chaos.endure(3)
    assert counts["kills"] == 3 and counts["moved runs"] >= 1
