"""Prepare the import of the libraries: hide messages that do not help users, and save a fifth of the time."""

import gc
import logging
import os

MOST_ROUNDED_MIB = 64  # larger pinned buffers are not rounded up to a power of two, nor kept when released

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

BENIGN = [
    # DeepSpeed finds no GPU. The run's first line names the device already.
    ("DeepSpeed", "Setting accelerator to CPU"),
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    # An optimizer of torch or of ours. This project checks and tests which ones fit a ZeRO stage.
    ("DeepSpeed", "You are using ZeRO with an untested optimizer"),
    # accelerate compares its own, unused accumulation count with DeepSpeed's.
    ("accelerate.accelerator", "Gradient accumulation steps mismatch"),
    # transformers imports torchao if it is installed. Its kernels are for some GPUs and one Python.
    ("torchao", "Failed to load"),
    ("torch.utils._pytree", "is an Enum subclass"),
    # A tied lm_head is stored once, as the embedding. An untied one is stored, and its checksum is checked.
    ("transformers.trainer", "missing keys in the checkpoint model loaded: ['lm_head.weight']."),
]


def silence_libraries() -> None:
    """Hide messages that do not help the user of a command. Call it first: some are logged during imports."""
    for logger, message in BENIGN:
        # m=message binds this turn's message; a lambda reads its other names when it is called
        logging.getLogger(logger).addFilter(lambda record, m=message: m not in record.getMessage())


def prepare_imports() -> None:
    """Stop the garbage collector (`SettledCollector` starts it again), set the allocator up, import the trackers."""
    # Collecting takes a fifth of the imports' time, and finds little: modules live as long as the process.
    gc.disable()
    _pin_what_is_asked_for()
    # The trackers' callbacks without WANDB_MODE: else every rank would print during this import that it is offline.
    mode = os.environ.pop("WANDB_MODE", None)
    import transformers.integrations.integration_utils  # noqa: F401

    if mode is not None:
        os.environ["WANDB_MODE"] = mode


def _pin_what_is_asked_for() -> None:
    """Have torch allocate large pinned buffers at their exact size. It would round 33 GiB up to 64.

    torch reads this setting once, when CUDA is first used. A user's own choice for these buffers stays.
    """
    name = next((name for name in _ALLOCATOR_SETTINGS if name in os.environ), _ALLOCATOR_SETTINGS[0])
    chosen = os.environ.get(name, "")
    if "pinned_max_" not in chosen:
        ours = f"pinned_max_cached_size_mb:{MOST_ROUNDED_MIB}"
        os.environ[name] = f"{chosen},{ours}" if chosen else ours
