"""Names of schedules (`training.lr_scheduler_type`) and optimizers (`training.optim`) that have rules of their own."""

CONSTANT = ("constant", "constant_with_warmup")
DECAYING = "warmup_stable_decay"
STABLE = (*CONSTANT, DECAYING)
"""Schedules that hold their peak: a stage may begin there."""

SCHEDULE_FREE = ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd")
"""Optimizers that average in place of a decay."""
