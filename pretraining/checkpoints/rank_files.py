"""What the Trainer is given to save and load with."""

from pathlib import Path

from transformers import Trainer

from pretraining.checkpoints.loading import load_checkpoint, load_random_state, load_running_loss
from pretraining.checkpoints.rank_share import write_share
from pretraining.checkpoints.saving import rank_share
from pretraining.runtime.process_group import rank_and_world_size


class RankFiles:
    """Saves before it returns, loads in place; all ranks call each together."""

    def save(self, trainer: Trainer, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_share(rank_share(trainer), folder, *rank_and_world_size())

    def load(self, trainer: Trainer, folder: Path) -> None:
        load_checkpoint(trainer, folder)

    def load_position(self, trainer: Trainer, folder: Path) -> None:
        load_random_state(folder)
        load_running_loss(trainer, folder)
