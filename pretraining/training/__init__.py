"""Run the loop around the Trainer: ranks, arguments, optimizers, and what watches a run."""
