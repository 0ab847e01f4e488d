"""What every process of a run needs: its ranks, its machine, its run folder, durable files, signs of life."""
