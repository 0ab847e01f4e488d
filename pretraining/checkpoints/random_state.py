"""The states of the random generators of one rank, as tensors and JSON."""

import random

import numpy as np
import torch


def random_tensors() -> dict[str, torch.Tensor]:
    """{"rng/torch", "rng/cuda"}: uint8 states of torch's generators, the current device's where there is one."""
    found = {"rng/torch": torch.random.get_rng_state()}
    if torch.cuda.is_available():
        found["rng/cuda"] = torch.cuda.random.get_rng_state()
    return found


def random_numbers() -> dict:
    """States of Python's and numpy's generators, for JSON."""
    kind, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {"python": [version, list(internal), gauss], "numpy": [kind, keys.tolist(), *rest]}


def set_random_state(tensors: dict[str, torch.Tensor], numbers: dict) -> None:
    """Set what `random_tensors` and `random_numbers` found."""
    version, internal, gauss = numbers["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = numbers["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.random.set_rng_state(tensors["rng/torch"])
    if torch.cuda.is_available() and "rng/cuda" in tensors:
        torch.cuda.random.set_rng_state(tensors["rng/cuda"])
