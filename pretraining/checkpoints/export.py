"""Make something of a checkpoint: an export, which loads with `from_pretrained` anywhere, or the same in other files.

A live Trainer is exported too. The logits are the same from any ZeRO stage. If the optimizer averages the weights that
it trains (`pretraining/recipe/training.py`), the averaged ones are exported.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.initialization import no_init_weights
from transformers.trainer import TRAINER_STATE_NAME

from pretraining.checkpoints.folders import damage, files_in, move_aside
from pretraining.checkpoints.format import MARKER, commit_checkpoint, file_entry, read_marker, write_receipt
from pretraining.checkpoints.live_state import LiveState
from pretraining.checkpoints.shard_files import (
    BUFFER,
    STATE_FILE,
    CheckpointReader,
    assemble,
    fragment_key,
    mean_running_loss,
    rank_file,
    read_state,
    write_rank_file,
)
from pretraining.errors import UserError
from pretraining.extend import MODEL, extensions_of_run, load_code_of_run, load_pretrained
from pretraining.planning.quantities import several
from pretraining.recipe.optimizer import AVERAGE
from pretraining.recipe.training import AVERAGING, Z
from pretraining.runtime.durable_files import one_line_disk_errors, replacing_folder, sync_to_disk
from pretraining.runtime.heartbeat import long_work, work_done
from pretraining.runtime.metric_names import OF_AVERAGE
from pretraining.runtime.run_folder import RunFolder
from pretraining.upstream.split_weights import whole_experts

EXCHANGED_NUMEL = 1 << 24  # elements that are copied at once where weights and their average change places


def export_model(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, folder: Path, model_card: str) -> None:
    """Gather the weights (every rank calls this); rank 0 writes the folder, whole or not at all, tied weights once."""
    with averaged_weights(trainer) as are_averaged:
        state_dict = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        split = whole_experts(trainer.model)
        if not trainer.is_world_process_zero():
            return
        if are_averaged:
            # These may be the live tensors, which get their trained values back when the block ends.
            state_dict = {name: tensor.clone() for name, tensor in state_dict.items() if name not in split}
        state_dict |= split
    write_model_folder(trainer.model, state_dict, tokenizer, folder, model_card)


def keep_changed_export(run: RunFolder) -> None:
    """Move an export to `aside/` if somebody has changed or added files since the run wrote it; the next one is new."""
    written = (run.last_event("end") or {}).get("export")
    if written and run.export.is_dir() and run.export_sizes() != written:
        print(f"{run.export} has changed since it was written: it is kept as {move_aside(run, run.export)}")


def export_checkpoint(
    checkpoint: Path,
    description: Path,
    folder: Path,
    trust_extensions: bool = False,
    shares: Mapping[Path, float] | None = None,
    exponential: bool = False,
) -> None:
    """Write the weights of a committed checkpoint as `folder`, whole or not at all; the caller has verified it.

    Needs none of the ranks that saved it. Takes host memory for the weights in their own precision, and for one
    parameter in fp32. description: the run's folder of config and tokenizer.
    trust_extensions: whether the code of a model of one's own may run; it may where it has run already.
    shares: checkpoints, or folders of weights, of the same model that are averaged, this one among them, with the share
    of each. exponential: write the average that the optimizer keeps (`optimizer.average_decay`).

    Raises `UserError` if an earlier one is of another model, or no average is kept.
    """
    marker = read_marker(checkpoint)
    if not (description / "config.json").exists():
        raise UserError(f"{description}: no config and tokenizer of the run there; an export needs them")
    own = extensions_of_run(description.parent) or extensions_of_run(checkpoint.parent)
    load_code_of_run(own, [MODEL], trust_extensions)
    # The model's class with its config, without memory for weights.
    dtype = _narrowest(getattr(torch, e["dtype"]) for e in read_state(checkpoint)["parameters"].values())
    with torch.device("meta"), no_init_weights():
        config = load_pretrained("AutoConfig", description)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    tokenizer = load_pretrained("AutoTokenizer", description)
    reader, of_average = CheckpointReader(checkpoint), f"eval_{OF_AVERAGE}"
    if exponential and not any(reader.has(AVERAGE, name) for name in reader.parameters):
        what = "no average is kept there (optimizer.average_decay)"
        raise UserError(f"{checkpoint}: {what}; leave out --average")
    results = {"step": marker["step"], "tokens": marker["tokens"]}
    # the checkpoint's own metrics say nothing about an average
    if shares:
        results |= {"averaged checkpoints": len(shares)}
    elif exponential:
        measured = {key: value for key, value in marker["metrics"].items() if key.startswith(of_average)}
        results |= {"weights": "their exponential average", **measured}
    else:
        results |= marker["metrics"]
    card = write_model_card(marker["recipe"], marker["data"], results, marker["environment"])
    weights, others = {}, {part: _weights_in(part) for part in shares or () if part != checkpoint}
    for name, entry in reader.state["parameters"].items():
        weight = averaged(reader, name, exponential)
        if shares:
            weight *= shares[checkpoint]
        for part, read in others.items():
            other = read(name)
            if other is None or other.shape != weight.shape:
                raise UserError(f"{part}: is of another model than {checkpoint.name}: {name} differs")
            weight.add_(other.float(), alpha=shares[part])
        weights[name] = weight.to(getattr(torch, entry["dtype"]))
    for name, entry in reader.state.get("buffers", {}).items():
        weights[name] = reader.read(BUFFER, name, 0, torch.Size(entry["shape"]).numel()).view(entry["shape"])
    reader.close()
    write_model_folder(model, weights, tokenizer, folder, card)


def _weights_in(part: Path) -> Callable[[str], torch.Tensor | None]:
    """Return what reads a parameter by its name from a checkpoint, or from a folder of weights alone."""
    if (part / MARKER).exists():
        reader = CheckpointReader(part)
        return lambda name: averaged(reader, name) if name in reader.parameters else None
    try:
        files = [safe_open(path, "pt") for path in sorted(part.glob("*.safetensors"))]
    except (OSError, SafetensorError) as error:
        raise UserError(f"{part}: its weights cannot be read ({error}); name others with --steps") from None
    place = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    return lambda name: place[name].get_tensor(name) if name in place else None


def demote_checkpoint(run: RunFolder, checkpoint: Path, folder: Path) -> bool:
    """Write the weights of a checkpoint as `folder`; returns whether the checkpoint may be removed now.

    A damaged checkpoint has no reliable weights and may be removed. If there is no room for the weights, the checkpoint
    must stay. Both cases write an event.
    """
    reason, removable = damage(checkpoint), True
    if reason is None:
        try:
            with one_line_disk_errors(run.path):
                export_checkpoint(checkpoint, run.model, folder)
            return True
        except UserError as error:
            reason, removable = str(error), False
    run.add_event("checkpoint_not_demoted", checkpoint=checkpoint.name, reason=reason)
    return removable


def write_model_folder(
    model: PreTrainedModel, weights: dict, tokenizer: PreTrainedTokenizerBase, folder: Path, model_card: str
) -> None:
    """Write weights, tokenizer and card; an older `folder` is replaced. `model` itself may hold no weights.

    A forward pass of the export computes the same as the run's validations; `generate` still uses a cache.
    """
    with replacing_folder(folder) as partial, long_work(growing=partial):
        # Tied weights are stored once, under the name that they are tied to.
        tied = set(model.all_tied_weights_keys)
        model.save_pretrained(partial, state_dict={k: v for k, v in weights.items() if k not in tied})
        config, generation = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
        # With a cache, transformers does not keep packed documents apart.
        config.use_cache, generation.use_cache = False, True
        # transformers writes the type of the first weight, which `model.keep_in_fp32` may keep in a wider one.
        config.dtype = _narrowest(each.dtype for each in weights.values() if each.is_floating_point())
        if hasattr(config, "output_router_logits"):
            # `loss` is the cross-entropy alone: the loss that balances a router is only for training.
            config.output_router_logits = False
        config.save_pretrained(partial)
        generation.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(model_card, encoding="utf-8")
        # safetensors makes its files 0600: they get the mode that the user's umask asks for. The umask can only be
        # read by setting it: it is put back at once.
        umask = os.umask(0o077)
        os.umask(umask)
        for path in files_in(partial):
            path.chmod(path.stat().st_mode & 0o111 | 0o666 & ~umask)
            # On the disk before the rename: after a power cut the folder must not be there with empty files.
            sync_to_disk(path)
            work_done()


def _narrowest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return min(dtypes, key=lambda dtype: dtype.itemsize)


@contextmanager
def averaged_weights(trainer: Trainer) -> Iterator[bool]:
    """Give the model its averaged weights in the block, and afterwards its trained ones, exactly to the bit.

    Every rank must call it. Yields whether there is an average; if so, it takes memory for a copy of the masters.
    """
    live = LiveState(trainer.model, trainer.optimizer)
    averaging = [block for block in live.blocks if AVERAGING in block.state]
    if not averaging:
        yield False
        return
    # A copy, because undoing the average by arithmetic would not give the same bits.
    trained = [block.tensor.detach().clone() for block in averaging]
    with torch.no_grad():
        for block in averaging:
            block.tensor.lerp_(block.state[Z], block.state[AVERAGING])
        live.set_weights()
    yield True  # no finally: after an error the other ranks would not take part in bringing the weights back
    with torch.no_grad():
        for block, tensor in zip(averaging, trained, strict=True):
            block.tensor.copy_(tensor)
        live.set_weights()


@contextmanager
def exponential_average(trainer: Trainer) -> Iterator[None]:
    """Exchange weights and their exponential average in the block, at any stage; afterwards both are as they were.

    Every rank must call it. Takes memory for a small part of the weights.
    """
    live = LiveState(trainer.model, trainer.optimizer)

    @torch.no_grad()
    def exchange() -> None:
        for block in live.blocks:
            with live.held(block, changed=True):
                average = block.state.get(AVERAGE, block.tensor)
                parts = (each.view(-1).split(EXCHANGED_NUMEL) for each in (block.tensor.detach(), average))
                for weights, its_average in zip(*parts, strict=True):
                    kept = weights.clone()
                    weights.copy_(its_average)
                    its_average.copy_(kept)
        live.set_weights()

    exchange()
    yield  # no finally: see above
    exchange()


def averaged(reader: CheckpointReader, parameter: str, exponential: bool = False) -> torch.Tensor:
    """Read masters in fp32, averaged if the run averages them. exponential: the kept average, if there is one."""
    if exponential and reader.has(AVERAGE, parameter):
        return assemble(reader, parameter, AVERAGE)
    masters = assemble(reader, parameter)
    share = reader.state["scalars"].get(parameter, {}).get(AVERAGING)
    return masters if share is None else masters.lerp_(assemble(reader, parameter, Z), share)


def write_model_card(recipe: dict, data: dict, results: dict, environment: dict) -> str:
    """Return an export's README.md, whose front matter the hub reads. data: a marker's; results: {metric: value}."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    formats, rows = ((float, ",.4f"), (int, ","), (object, "")), ""
    for name, value in results.items():
        number = format(value, next(form for kind, form in formats if isinstance(value, kind)))
        rows += f"| {name.replace('_', ' ')} | {number} |\n"
    train, validation = data["splits"]["train"], data["splits"]["validation"]
    given = recipe["model"].get("initial_weights")
    start = f"Training began with the weights of `{given}`. " if given else ""
    if shape := recipe["model"].get("from"):
        start += f"The shape is that of `{shape}`, of whose config.json some keys may be changed. "
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [pretraining, deepspeed]
---

# {recipe["name"]}

{recipe["description"]}

## Results

| metric | value |
|---|---|
{rows}
## Data

`{recipe["data"]["name"]}`: {train["tokens"]:,} training tokens in {train["documents"]:,} documents,
{validation["tokens"]:,} validation tokens in {validation["documents"]:,} documents.
Fingerprint of the tokens: `{data["fingerprint"]}`.

## Training

{start}{several(environment["world_size"], "rank")} on {environment["device"]};
git commit `{environment["git_commit"]}`.
{versions}.

Recipe:

```json
{json.dumps(recipe, indent=2, ensure_ascii=False)}
```
"""


def reshard(folder: Path, target_folder: Path, num_files: int) -> None:
    """Write `folder`, whole and verified, as a checkpoint of `num_files` equal files to `target_folder`.

    No resume needs this, because any number of ranks reads any files. Takes memory for one slice of a parameter. The
    random states of the ranks that saved are left out, as if the run had continued with another number of ranks; of
    their running losses it keeps the mean.
    """
    reader, marker = CheckpointReader(folder), read_marker(folder)
    loss = mean_running_loss(folder, range(reader.ranks), reader.ranks)
    kept = {"running_loss": loss} if loss else {}
    with replacing_folder(target_folder, is_new=True) as partial:
        partial.mkdir(parents=True)
        copied = [name for name in (STATE_FILE, TRAINER_STATE_NAME) if (folder / name).exists()]
        for name in copied:
            shutil.copyfile(folder / name, partial / name)
        for index in range(num_files):
            name = rank_file(index, num_files)
            files = {name: _write_share(reader, partial / name, index, num_files)}
            files |= {each: file_entry(partial / each) for each in copied if index == 0}
            write_receipt(partial, index, num_files, files, **kept)
        own = ("format", "checksum", "files", "ranks")  # they describe the marker's files and not the run
        content = {key: value for key, value in marker.items() if key not in own}
        commit_checkpoint(partial, {**content, "ranks": num_files})


def _write_share(reader: CheckpointReader, path: Path, index: int, num_files: int) -> dict:
    totals = {
        (state, name): reader.numel(name) for name in reader.parameters for state in reader.states(name)
    }
    for name, entry in reader.state.get("buffers", {}).items():
        totals[BUFFER, name] = torch.Size(entry["shape"]).numel()
    slices, shapes = {}, {}
    for (state, name), total in totals.items():
        # Shares of every parameter, so that the files are of equal size; a small one may have none in this file.
        start, end = total * index // num_files, total * (index + 1) // num_files
        if end > start:
            key = fragment_key(state, name, start)
            slices[key] = (state, name, start, end - start)
            # `meta` takes no memory: each slice is read when it is written.
            shapes[key] = torch.empty(end - start, dtype=reader.dtype(state, name), device="meta")
    whole = {}
    if index == 0:  # small: factors of moments
        names = [(state, name) for name in reader.parameters for state in reader.whole_states(name)]
        whole = {fragment_key(state, name, None): reader.read_whole(state, name) for state, name in names}

    def read(key: str) -> torch.Tensor:
        return whole[key] if key in whole else reader.read(*slices[key])

    return write_rank_file(path, {**shapes, **whole}, read)
