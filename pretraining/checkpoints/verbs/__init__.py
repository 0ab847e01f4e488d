"""What `python -m pretraining.checkpoints` does, one module a verb, as `pretraining.verbs` describes it."""
