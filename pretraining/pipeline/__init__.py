"""From a recipe to a published model: each step runs if what it depends on has changed, else it is left out."""
