"""Optimizers that train other weights than they mean to be used (Defazio et al. 2024, The Road Less Scheduled).

A schedule-free optimizer takes gradients at y, and means the average x. Both lie on a line with the sequence z that it
keeps as a state: x = y + `AVERAGING` (z - y). It keeps that number too, for every tensor that it has stepped.
"""

Z = "z"
AVERAGING = "averaging"
