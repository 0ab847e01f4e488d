"""The model: built from the recipe, with the same initial weights at every ZeRO stage, and its loss."""
