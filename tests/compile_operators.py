"""DeepSpeed's CPU operators, compiled where they are not yet: `python -m tests.compile_operators`."""

import os

from deepspeed.accelerator import get_accelerator


def main() -> None:
    os.nice(10)
    builder = get_accelerator().create_op_builder("CPUAdamBuilder")
    if builder is not None:
        builder.load(verbose=False)


if __name__ == "__main__":
    main()
