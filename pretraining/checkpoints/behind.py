"""What the Trainer saves with: its state is copied and training goes on; threads write, commit, forget and upload."""

from pathlib import Path

from transformers import Trainer, TrainerCallback

from pretraining.checkpoints.commit import commit_checkpoint
from pretraining.checkpoints.identity import Identity, metrics_at
from pretraining.checkpoints.rank_files import RankFiles
from pretraining.checkpoints.remote import RemoteRun
from pretraining.checkpoints.retention import Retention
from pretraining.checkpoints.saving import rank_share
from pretraining.checkpoints.upload import Uploader
from pretraining.checkpoints.weights import demote_checkpoint
from pretraining.checkpoints.writer import CheckpointWriter
from pretraining.runtime.run_folder import RunFolder


class SavesBehindTraining(RankFiles, TrainerCallback):
    """`save` returns once the copy is made; the callback looks after it at each step, and waits for it at the end.

    Comes before the callback that writes the metrics: a row after a save tells how long it blocked. section: the
    recipe's `checkpoints`.
    """

    def __init__(self, run: RunFolder, identity: Identity, section: dict):
        self.run, self.identity = run, identity
        self.retention = Retention.of(section, demote_checkpoint, identity.recipe.evaluation["metric"])
        address = section["upload"]
        remote = address and RemoteRun(address, run.path.name)
        self.uploader = Uploader(run, remote, section["upload_mirror"]) if remote else None
        self.writer = CheckpointWriter(
            run,
            commit_checkpoint,
            self._forget_old,
            self._offer,
            section["background"],
            section["on_full_disk"],
        )
        self._told: dict | None = None

    def save(self, trainer: Trainer, folder: Path) -> None:
        """Begin to save; the marker's numbers are those of this step."""
        step, share = trainer.state.global_step, rank_share(trainer)
        marker = self.identity.marker_at(step, metrics_at(step, trainer.state.log_history))
        self.writer.save(step, share.tensors, share.files, share.receipt, marker)

    def on_train_begin(self, args, state, control, **kwargs):
        if (checkpoint := self.identity.start.checkpoint) is not None:
            self._offer(checkpoint)  # its upload may have been interrupted

    def on_step_end(self, args, state, control, **kwargs):
        self.writer.poll()

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs and self.writer.last is not self._told:
            self._told = self.writer.last
            logs["save_blocked_seconds"] = self._told["blocked_seconds"]
            logs["save_snapshot_bytes"] = self._told["snapshot_bytes"]

    def on_train_end(self, args, state, control, **kwargs):
        self.writer.drain()

    def finish(self) -> None:
        """Wait for the last upload, or for its failure; every rank calls this at the end of the run."""
        if self.uploader is not None:
            self.uploader.drain()

    def _offer(self, folder: Path) -> None:
        if self.uploader is not None and folder.parent == self.run.path:
            self.uploader.offer(folder)

    def _forget_old(self) -> None:
        removed = self.retention.apply(self.run)
        if self.uploader is not None:
            self.uploader.forget([folder.name for folder in removed])
