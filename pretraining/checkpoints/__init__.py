"""Checkpoints (resumable) and exports (`from_pretrained`): commit, verify, find, start, retention, export.

The names below are imported when first used, so that a look at a run folder never waits for torch.
"""

from pretraining.lazy import imported_at_first_use

_HOME = {
    "Identity": "identity",
    "RankFiles": "rank_files",
    "SavesBehindTraining": "behind",
    "averaged_weights": "averaged",
    "bring_checkpoint": "arrival",
    "disk_errors_told": "full_disk",
    "export_model": "export",
    "find_start": "start",
    "open_run": "start",
    "roll_back": "rollback",
    "sole_run": "lock",
    "write_model_card": "model_card",
}

__all__ = list(_HOME)

__getattr__ = imported_at_first_use(__name__, _HOME)
