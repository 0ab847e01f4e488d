"""DeepSpeed's CPU operators, compiled where they are not yet: `python -m tests.gear.compile_operators`."""

from deepspeed.accelerator import get_accelerator

from pretraining.training.operators import keep_compiled_operators
from pretraining.upstream.torch import ask_the_processor_once


def main() -> None:
    ask_the_processor_once()
    keep_compiled_operators()
    builder = get_accelerator().create_op_builder("CPUAdamBuilder")
    if builder is not None:
        builder.load(verbose=False)


if __name__ == "__main__":
    main()
