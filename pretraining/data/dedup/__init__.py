"""Deduplication and decontamination, as pure functions over arrays and files; the preparation runs them as tasks."""
