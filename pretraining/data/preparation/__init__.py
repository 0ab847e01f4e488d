"""Text to prepared data: a chain of stages whose tasks run in processes, or on a cluster, and can be run again."""
