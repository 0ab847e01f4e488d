"""Provide the CheckpointManager, with which the Trainer saves and loads.

The order of a save: this rank's share of the Trainer's state is gathered (trainer_state.py), copied and written in the
background (background.py), and committed (format.py). Then old checkpoints are removed (retention.py) and the new one
is uploaded (upload.py). Loading reads the files (shard_files.py) into the live state (live_state.py).
"""

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pretraining.checkpoints.background import CheckpointWriter
from pretraining.checkpoints.export import averaged_weights, demote_checkpoint
from pretraining.checkpoints.fetch import fetch_absent
from pretraining.checkpoints.format import commit_checkpoint
from pretraining.checkpoints.identity import Identity, Start, metrics_at
from pretraining.checkpoints.live_files import send_export
from pretraining.checkpoints.remote import RemoteRun
from pretraining.checkpoints.retention import Retention
from pretraining.checkpoints.shard_files import fetch_nothing
from pretraining.checkpoints.trainer_state import load_position, load_state, rank_share
from pretraining.checkpoints.upload import Uploader
from pretraining.data.prepared import PreparedData
from pretraining.planning.run_plan import RunPlan
from pretraining.recipe import Recipe
from pretraining.runtime.heartbeat import long_work
from pretraining.runtime.process_group import device_name, from_rank_0
from pretraining.runtime.run_folder import RunFolder, describe_environment


class CheckpointManager(TrainerCallback):
    """Saves, commits, removes and uploads the checkpoints of one start of a run, and loads the one it continues from.

    The Trainer calls `save`, `load_state` and `load_position`, on all ranks together. As a callback it polls the save
    in flight at each step, and waits for it at the end. It comes before the callback that writes the metrics, because
    the first row after a save says how long the save blocked training.
    """

    def __init__(
        self,
        run: RunFolder,
        recipe: Recipe,
        plan: RunPlan,
        data: PreparedData,
        start: Start,
    ) -> None:
        self.run, self.start = run, start
        environment = describe_environment(device_name(), plan.world_size)
        self.identity = Identity.of(recipe, plan, data.manifest, environment, start)
        section = recipe.checkpoints
        self.retention = Retention.of(section, demote_checkpoint, recipe.evaluation.metric)
        address = section.upload
        remote = address and RemoteRun(address, run.path.name)
        self.uploader = Uploader(run, remote, section.upload_mirror, self.retention) if remote else None
        self.writer = CheckpointWriter(
            run,
            commit_checkpoint,
            after_commit=self._remove_old,
            on_committed=self._upload,
            background=section.background,
            on_full_disk=section.on_full_disk,
        )
        # The step, and how many rows were logged: a validation at the same step adds a row and is saved again.
        self._last_saved: tuple[int, int] | None = None
        self._last_logged: dict | None = None

    def save(self, trainer: Trainer) -> None:
        """Begin to save the Trainer's state of this step; returns once it is copied and may change."""
        step, rows = trainer.state.global_step, trainer.state.log_history
        # When the Trainer leaves its loop, a stop and the end of an epoch ask for the same save again.
        if self._last_saved == (step, len(rows)):
            return
        self._last_saved = step, len(rows)
        marker = self.identity.marker_at(step, metrics_at(step, rows))
        self.writer.save(step, *rank_share(trainer), marker)

    def load_state(self, trainer: Trainer, folder: Path) -> None:
        """Set weights, optimizer, schedule and loss scaler of a prepared Trainer from a checkpoint."""
        fetch = None if self.run.disks.shared else fetch_nothing
        if self.start.source is not None:
            fetch = partial(fetch_absent, self.start.source, folder)
        load_state(trainer, folder, fetch)

    def load_position(self, trainer: Trainer, folder: Path) -> None:
        # Called after the Trainer's loop has reset its own counters: they would overwrite these.
        load_position(trainer, folder)

    def averaged_weights(self, trainer: Trainer) -> AbstractContextManager:
        """Put the averaged weights in place inside the block, if the optimizer averages the weights that it trains."""
        return averaged_weights(trainer)

    def wait_for_upload(self) -> None:
        """Wait until the last checkpoint and the export are uploaded, or failed; every rank calls this at the end."""
        if self.uploader is None:
            return
        self.uploader.wait()
        with long_work():
            from_rank_0(lambda: send_export(self.run, self.uploader.remote))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The upload of the one from which the run continues may have been interrupted.
        if self.start.checkpoint is not None:
            self._upload(self.start.checkpoint)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.writer.poll()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict, **kwargs: Any
    ) -> None:
        """Add to the first row after a save how long it blocked training, and the bytes of its copy."""
        # Rows of validations have no `loss`; they do not count as the first row.
        if "loss" in logs and self.writer.last is not self._last_logged:
            self._last_logged = self.writer.last
            logs["save_blocked_seconds"] = self._last_logged["blocked_seconds"]
            logs["save_snapshot_bytes"] = self._last_logged["snapshot_bytes"]

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.writer.wait()

    def _upload(self, folder: Path) -> None:
        # --resume PATH may name a checkpoint of another run, which this run must not upload.
        if self.uploader is not None and folder.parent == self.run.path:
            self.uploader.offer(folder)

    def _remove_old(self) -> None:
        removed = self.retention.apply(self.run)
        if self.uploader is not None:
            self.uploader.remove([folder.name for folder in removed])
