"""Give every process of a run what it needs: ranks, machine, run folder, durable files, heartbeats."""
