"""Start train.py as a module: `deepspeed --module pretraining.train`, also where there is no checkout."""

import runpy

from pretraining.runtime.installation import REPOSITORY

if __name__ == "__main__":
    runpy.run_path(str(REPOSITORY / "train.py"), run_name="__main__")
