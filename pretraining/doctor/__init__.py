"""Find what a machine or a cluster will do to a run before it is paid for: `python -m pretraining.doctor`."""
