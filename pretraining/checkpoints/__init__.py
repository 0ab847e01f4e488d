"""Checkpoints (resumable) and exports (`from_pretrained`): commit, verify, resume, remove, upload, export.

`CheckpointManager` (manager.py) is what the Trainer saves and loads with; `find_start` (resume.py) says where a run
goes on; the format on disk is described in format.py. Nothing is imported here: a look at a run folder never waits
for torch.
"""
