"""Checkpoints (resumable) and exports (`from_pretrained`): commit, verify, resume, remove, upload, export.

To follow a save begin with manager.py, for a start with resume.py, for the files on disk with format.py, and for the
commands with __main__.py. Nothing is imported here, so that looking at a run folder never waits for torch.
"""
