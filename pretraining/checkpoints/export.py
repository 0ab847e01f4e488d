"""`runs/<name>/export/`: loads with `from_pretrained` anywhere, the same logits from any ZeRO stage."""

import copy
import shutil
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from pretraining.checkpoints.averaged import averaged_weights
from pretraining.checkpoints.files import files_in, follow_umask, wait_for_disk
from pretraining.checkpoints.marker import flush_folder
from pretraining.runtime.heartbeat import long_work


def export_model(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, folder: Path, model_card: str) -> None:
    """Gather the weights (every rank must call this) and let rank 0 write safetensors, tokenizer and card.

    Tied weights are stored once. The folder appears whole or not at all.
    """
    with averaged_weights(trainer) as are_averaged:
        state_dict = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        if not trainer.is_world_process_zero():
            return
        if are_averaged:
            state_dict = {name: tensor.clone() for name, tensor in state_dict.items()}
    write_model_folder(trainer.model, state_dict, tokenizer, folder, model_card)


def write_model_folder(
    model: PreTrainedModel, weights: dict, tokenizer: PreTrainedTokenizerBase, folder: Path, model_card: str
) -> None:
    """Write weights (of a model that need hold none itself), tokenizer and card; an older `folder` is replaced."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with long_work(growing=partial):
        _save(model, weights, partial)
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(model_card, encoding="utf-8")
        files = files_in(partial)
        follow_umask(files)
        wait_for_disk(files)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    flush_folder(folder.parent)


def _save(model: PreTrainedModel, state_dict: dict, folder: Path) -> None:
    """Write safetensors, the config and the generation config.

    A forward pass of the export does what the run's validations did. It fills no cache: with one, transformers does
    not keep packed documents apart. Its `loss` is the cross-entropy alone, without the balance of a router, which is
    for training. `generate` does fill a cache.
    """
    tied = set(model.all_tied_weights_keys)
    model.save_pretrained(folder, state_dict={k: v for k, v in state_dict.items() if k not in tied})
    config, generation = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
    config.use_cache, generation.use_cache = False, True
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
