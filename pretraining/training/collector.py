"""Python's garbage collector, kept away from what lives as long as the run: modules, model, engine.

Each of its full passes looks at every object that is alive, a million once the libraries are imported, and comes at
another moment on every rank: the others wait for it in the next collective.
"""

import gc

from transformers import TrainerCallback


class SettledCollector(TrainerCallback):
    """From the first step on only what came after it is looked at. `train.py` imports without collecting."""

    def on_train_begin(self, args, state, control, **kwargs):
        gc.collect()
        gc.freeze()
        gc.enable()
