"""The model: built from the recipe, initialised alike at every stage, and its loss.

The names below are imported when first used, so that counting a model does not wait for DeepSpeed.
"""

from pretraining.lazy import imported_at_first_use

_HOME = {
    "build_from_recipe": "build",
    "build_loss": "loss",
    "build_model": "build",
    "load_tokenizer": "build",
}

__all__ = list(_HOME)

__getattr__ = imported_at_first_use(__name__, _HOME)
