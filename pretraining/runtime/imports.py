"""What to do before the libraries are imported: without messages that tell their user nothing, and a fifth sooner."""

import gc
import logging
import os
import warnings

MOST_ROUNDED_MIB = 64
"""Pinned buffers above this are neither rounded up to a power of two nor kept once they are released."""

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

BENIGN = [
    # DeepSpeed finds no GPU: the run's first line names the device.
    ("DeepSpeed", "Setting accelerator to CPU"),
    # An optimizer of torch or of ours: which ones fit a ZeRO stage is checked, and tested, here.
    ("DeepSpeed", "You are using ZeRO with an untested optimizer"),
    # accelerate compares its own, unused accumulation count with DeepSpeed's.
    ("accelerate.accelerator", "Gradient accumulation steps mismatch"),
    # transformers imports torchao wherever it is installed; its kernels are for some GPUs and one Python.
    ("torchao", "Failed to load"),
    ("torch.utils._pytree", "is an Enum subclass"),
    # A tied lm_head is stored once, as the embedding it is. An untied one is: its checksum is checked.
    ("transformers.trainer", "missing keys in the checkpoint model loaded: ['lm_head.weight']."),
]


def silence_libraries() -> None:
    """Keep back messages that tell a command's user nothing; some are logged while the libraries are imported."""
    for logger, message in BENIGN:
        logging.getLogger(logger).addFilter(lambda record, m=message: m not in record.getMessage())
    # torch 2.13 renamed collectives that DeepSpeed 0.19.8 still calls by their old names.
    warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed")


def prepare_imports() -> None:
    """Let the libraries be imported without collecting garbage, which takes a fifth of the imports' time.

    What they bring lives as long as the process. `SettledCollector` (training/monitors.py) switches the collector on
    again.
    """
    gc.disable()
    _pin_what_is_asked_for()
    _import_trackers()


def _pin_what_is_asked_for() -> None:
    """Let torch take large buffers of pinned memory as they are; it would round 33 GiB up to 64.

    It reads this once, when CUDA is first used. What a user has chosen for these buffers stays.
    """
    name = next((name for name in _ALLOCATOR_SETTINGS if name in os.environ), _ALLOCATOR_SETTINGS[0])
    chosen = os.environ.get(name, "")
    if "pinned_max_" not in chosen:
        own = f"pinned_max_cached_size_mb:{MOST_ROUNDED_MIB}"
        os.environ[name] = f"{chosen},{own}" if chosen else own


def _import_trackers() -> None:
    """Every rank would print that WANDB_MODE is offline, as soon as it imports this."""
    mode = os.environ.pop("WANDB_MODE", None)
    import transformers.integrations.integration_utils  # noqa: F401

    if mode is not None:
        os.environ["WANDB_MODE"] = mode
