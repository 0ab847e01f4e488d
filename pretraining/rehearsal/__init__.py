"""Rehearse the start of a run on many ranks, on a machine that has none of them."""
