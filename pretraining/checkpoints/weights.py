"""From a checkpoint's masters to a `from_pretrained` folder: offline, without the ranks and libraries that saved it."""

import shutil
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from pretraining.checkpoints.averaged import averaged
from pretraining.checkpoints.export import write_model_folder
from pretraining.checkpoints.full_disk import disk_errors_told
from pretraining.checkpoints.marker import read_marker
from pretraining.checkpoints.model_card import write_model_card
from pretraining.checkpoints.shard_files import CheckpointReader, read_state
from pretraining.checkpoints.verification import damage
from pretraining.errors import UserError
from pretraining.runtime.run_folder import RunFolder

_BUFFER = "buffer"


def describe_model(run: RunFolder, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Keep in the run folder what its checkpoints do not hold and an export needs: config and tokenizer."""
    partial = run.model.with_name(run.model.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(run.model, ignore_errors=True)
    partial.rename(run.model)


def export_checkpoint(checkpoint: Path, description: Path, folder: Path) -> None:
    """Write the weights of a committed checkpoint as `folder`, whole or not at all; the caller has verified it.

    description: the folder that `describe_model` wrote. Takes host memory of the weights in their own precision,
    and of one parameter in fp32.
    """
    marker = read_marker(checkpoint)
    if not (description / "config.json").exists():
        raise UserError(f"{description}: no config and tokenizer of the run there; an export needs them")
    model, tokenizer = _empty_model(checkpoint, description), AutoTokenizer.from_pretrained(description)
    card = write_model_card(marker["recipe"], marker["data"], _results(marker), marker["environment"])
    write_model_folder(model, read_weights(checkpoint), tokenizer, folder, card)


def demote_checkpoint(run: RunFolder, checkpoint: Path, folder: Path) -> bool:
    """Keep of a checkpoint its weights alone, as `folder`; whether the checkpoint may go now.

    A damaged one has no weights to trust and may go; where there is no room for them it stays. Both leave an event.
    """
    reason = damage(checkpoint)
    if reason is None:
        try:
            with disk_errors_told(run.path):
                export_checkpoint(checkpoint, run.model, folder)
            return True
        except UserError as error:
            reason = str(error)
            shutil.rmtree(folder.with_name(f"{folder.name}.partial"), ignore_errors=True)
            run.add_event("checkpoint_not_demoted", checkpoint=checkpoint.name, reason=reason)
            return False
    run.add_event("checkpoint_not_demoted", checkpoint=checkpoint.name, reason=reason)
    return True


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """{name: tensor} of every parameter (averaged) and persistent buffer, in the precision of the run."""
    reader = CheckpointReader(checkpoint)
    weights = {}
    for name, entry in reader.state["parameters"].items():
        weights[name] = averaged(reader, name).to(getattr(torch, entry["dtype"]))
    for name, entry in reader.state.get("buffers", {}).items():
        weights[name] = reader.read(_BUFFER, name, 0, torch.Size(entry["shape"]).numel()).view(entry["shape"])
    reader.close()
    return weights


def _empty_model(checkpoint: Path, description: Path) -> PreTrainedModel:
    """The model's class and config, without memory for weights."""
    entries = read_state(checkpoint)["parameters"].values()
    dtype = getattr(torch, next(iter(entries))["dtype"])
    with torch.device("meta"), no_init_weights():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(description), dtype=dtype)


def _results(marker: dict) -> dict:
    """What was measured at that step, for the model card."""
    return {"step": marker["step"], "tokens": marker["tokens"], **marker["metrics"]}
