"""A preparation as stages of numbered tasks, run here, in processes of this machine, or on a cluster."""
