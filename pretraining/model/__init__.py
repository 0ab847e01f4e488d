"""The model: built from the recipe, initialised alike at every stage, and its loss."""

from pretraining.model.build import build_from_recipe, build_model, load_tokenizer
from pretraining.model.loss import build_loss

__all__ = ["build_from_recipe", "build_loss", "build_model", "load_tokenizer"]
