"""Name the states of optimizers that do not train the weights to use (Defazio et al. 2024, The Road Less Scheduled).

A schedule-free optimizer takes gradients at y, but its result is the average x. It keeps a sequence z as a state, and
x = y + `AVERAGING` (z - y). It keeps this number too, for every tensor that it has stepped.
"""

Z = "z"
AVERAGING = "averaging"
