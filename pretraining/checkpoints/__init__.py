"""Checkpoints (resumable) and exports (`from_pretrained`): commit, verify, resume, remove, upload, export.

manager.py is the way into a save, resume.py into a start, format.py into the files on disk, __main__.py into the
commands. Nothing is imported here: a look at a run folder never waits for torch.
"""
