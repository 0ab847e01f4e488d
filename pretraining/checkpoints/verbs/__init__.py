"""What `python -m pretraining.checkpoints` does, one module a verb, as `pretraining.command_line` describes it."""
