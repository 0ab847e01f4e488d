"""What `python -m pretraining.planning` answers, one module a verb, as `pretraining.command_line` describes it."""
