"""What a run will take, known from the recipe alone."""
