"""What a machine or a cluster will do to a run, found before it is paid for: `python -m pretraining.doctor`."""
