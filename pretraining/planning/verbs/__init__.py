"""What `python -m pretraining.planning` answers, one module a verb, as `pretraining.verbs` describes it."""
