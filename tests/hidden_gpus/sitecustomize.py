"""Python imports this when it starts, if this folder is on its path: no GPU is seen, whatever started the process.

The `deepspeed` launcher sets the variable anew for the ranks it starts (deepspeed 0.19.8, launcher/launch.py).
"""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""
