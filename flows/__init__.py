"""The pipeline as workflows of engines that schedule it."""
