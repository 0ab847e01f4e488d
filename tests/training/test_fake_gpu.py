"""Training, validation and sampling on a GPU that is none: no step mixes devices, and every wait is on a written list.

The real Trainer steps the real DeepSpeed engine with the real loss, optimizer and monitors; `WAITS` says where the host
waits for the device, how often, and why.
"""

import json
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from pretraining.checkpoints.export import averaged_weights
from pretraining.checkpoints.format import Start
from pretraining.data.order import GlobalOrder
from pretraining.data.packed_dataset import PackedDataset
from pretraining.data.shards import SplitWriter, TokenSplit
from pretraining.evaluation.sampling import sample_text
from pretraining.evaluation.scores import HellaSwag, Item, Passes
from pretraining.evaluation.validation import Validation
from pretraining.model import loss as losses
from pretraining.model.build import build_from_recipe
from pretraining.planning.run_plan import build_run_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import load_recipe
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.runtime.process_group import rank_groups
from pretraining.runtime.run_folder import RunFolder
from pretraining.training.arguments import build_arguments
from pretraining.training.monitors import RunMonitors, SettledCollector
from pretraining.training.muon import MatrixFragment
from pretraining.training.trainer import PretrainingTrainer, RunParts
from tests.gear.runs import EXPERTS, LLAMA, MIXTRAL, QWEN3, TOKENIZER
from tests.gear.watched_gpu import Watch, watched_gpu

LENGTH, STEPS, ACCUMULATION = 64, 2, 2

OURS = "pretraining/training"
NORM = "pretraining/upstream/deepspeed.py:read_norm"

# The written list: where the host waits for the device, and how often.
EVERY_STEP = {
    # Whether the step is made: all else follows from the norm on the host.
    "zero0": {NORM: 1},
    "zero1": {NORM: 1},
    "zero2": {NORM: 1},
    "zero3": {NORM: 1},
    "null": {f"{OURS}/stability.py:_before_step": 1},
}
LOSS = {f"{OURS}/stability.py:read": 1}
"""Of the step, to judge it: its forward pass was over before the norm was known, so that nothing is waited for."""
MEASURED = {
    f"{OURS}/gradients.py:_see",
    f"{OURS}/gradients.py:on_step_end",
    "pretraining/runtime/process_group.py:sum_over_ranks",
}
"""On steps that a monitor measures, if the recipe asks for it."""
LOGGED = {
    "transformers/trainer.py:_maybe_log_save_evaluate",
    "transformers/trainer.py:store_flos",
    "transformers/trainer_pt_utils.py:distributed_broadcast_scalars",
    f"{OURS}/throughput.py:take",
    f"{OURS}/throughput.py:gather",
    f"{OURS}/metrics.py:on_log",
    f"{OURS}/experts.py:on_log",
    "pretraining/runtime/process_group.py:sum_over_ranks",
}
"""On steps that are logged: the running loss and what else a row of metrics says."""
MOST_A_STEP = 2
"""Waits of the host, at every stage."""

TIED = {**QWEN3, "tie_word_embeddings": True}
GPT2 = {"model_type": "gpt2", "vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def written_recipe(folder: Path, model_section: dict, **sections: dict) -> Path:
    """recipes/features/gpt2.json in bf16 with another model and the keys of `sections` changed, as a file."""
    values = load_recipe("features/gpt2").to_dict() | {"name": "faked", "model": model_section}
    values["data"]["tokenizer"] = {"train_vocab_size": 512}
    values["training"] |= {"bf16": True, "logging_steps": 1, "per_device_train_batch_size": 2}
    values["training"] |= {"eval_strategy": "no", "save_strategy": "no", "warmup_steps": 0}
    values["training"] |= {"logging_first_step": False}
    # nobody leaves the group of ranks here, which would end a watch: it would end this process after twenty minutes
    values["monitors"] = values.get("monitors", {}) | {"hang_minutes": None}
    for name, changed in sections.items():
        values[name] |= changed
    path = folder / "faked.json"
    path.write_text(json.dumps(values))
    return path


class LastStep(TrainerCallback):
    """Where the host waits in the last step of a training, in the log before it, and what a micro-batch waits for."""

    def __init__(self, machine):
        self.machine, self.logged, self.micro_batches, self.step = machine, Counter(), Counter(), Counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self.logged = self.take()

    def on_substep_end(self, *args, **kwargs):
        self.micro_batches = self.take()

    def on_step_end(self, args, state, control, **kwargs):
        self.step = self.take() - self.micro_batches  # the last micro-batch belongs to it

    def take(self) -> Counter:
        places = Counter(each.where for each in self.machine.synchronisations)
        self.machine.synchronisations.clear()
        return places


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> TokenSplit:
    """200 documents of 40 tokens."""
    folder = tmp_path_factory.mktemp("tokens") / "train"
    writer = SplitWriter(folder, np.dtype(np.uint16), 9_000)
    for _ in range(200):
        writer.append(np.arange(40, dtype=np.uint16), 80)
    return TokenSplit(folder, writer.finish())


def make_trainer(machine, recipe_path: Path, split: TokenSplit, ds_config: str, *callbacks):
    """As train.py's, over a made-up stream of tokens in two sources; nothing is saved."""
    tokens = machine.world_size * ACCUMULATION * 2 * LENGTH
    budget = (f"budget.tokens_per_step={tokens}", f"budget.tokens={STEPS * tokens}")
    recipe, config = load_recipe_and_ds_config(str(recipe_path), budget, ds_config, machine.world_size)
    run, start = RunFolder(recipe_path.parent / "run"), Start()
    plan = build_run_plan(Setup(recipe, config, machine.world_size))
    arguments = build_arguments(recipe, config, run.path, plan.accumulation_steps, STEPS)
    groups = rank_groups(plan.degrees)
    language_model = build_from_recipe(recipe, TOKENIZER, arguments, False, groups=groups)
    order = GlobalOrder(2 * split.num_blocks(LENGTH), 0, "faked")
    masks = recipe.data.document_masking
    dataset = PackedDataset((split, split), LENGTH, order, 0, recipe.num_samples, masks_documents=masks)
    monitors = RunMonitors(run, recipe)
    monitors.begin(plan, start, dataset)
    validation = Validation(split, recipe)
    evaluator = SimpleNamespace(dataset=validation.dataset, callbacks=())
    evaluator.measure = lambda trained, step, interrupted: validation.measure(trained, interrupted)
    return PretrainingTrainer(
        recipe,
        language_model,
        arguments,
        loss=losses.build_loss(language_model, recipe.loss, groups),
        train_dataset=dataset,
        parts=RunParts(evaluator, NoCheckpoints(), monitors, callbacks=callbacks, groups=groups),
    )


class NoCheckpoints(TrainerCallback):
    """Saves nothing."""

    averaged_weights = staticmethod(averaged_weights)


def last_step(
    folder: Path,
    split,
    ds_config: str,
    world_size: int,
    model_section: dict,
    busy: bool = False,
    watch: Watch | None = None,
    **sections,
) -> LastStep:
    """Train a recipe for a few steps."""
    path = written_recipe(folder, model_section, **sections)
    with watched_gpu(world_size, busy=busy, watch=watch) as machine:
        if "zero3" in ds_config:
            machine.object_of = of_rank
        waits = LastStep(machine)
        trainer = make_trainer(machine, path, split, ds_config, waits)
        trainer.remove_callback(SettledCollector)  # after it, a release looks at all that is imported here
        trainer.train()
        trainer.release()
    return waits


def of_rank(sent, rank: int):
    """What another rank sends: under ZeRO-3 Muon's slices are those behind this one's."""
    if not (isinstance(sent, list) and sent and isinstance(sent[0], tuple)):
        return sent
    return [tuple(MatrixFragment(*each)._replace(start=rank * each[4])) for each in sent]


CONSTANT = {"lr_scheduler_type": "constant_with_warmup", "lr_scheduler_kwargs": {}}
FREE = {"optim": "schedule_free_adamw", **CONSTANT}
APART, MUON = {"data": {"document_masking": True}}, {"name": "muon"}
TWO_SOURCES = {"sources": [{"builtin": "python_stdlib", "name": name} for name in "ab"]}
EVERY_MONITOR = {"layer_norms_steps": 1, "noise_scale_steps": 1}
Z_LOSS, CHUNKED = {"z_loss": 1e-4}, {"kind": "chunked", "chunk_tokens": 32}
ROUTED, BY_UNITS = {"kind": "fused", "router_z_loss": 1e-3}, {"adaptive_clip": 0.01}
PLAIN_LOSS = {"loss": {"kind": "plain"}, "optimizer": {"clip_value": 1.0}}
CASES = {
    "gpt2, fused loss": ("zero1", 8, GPT2, {"monitors": EVERY_MONITOR}),
    "gpt2, documents apart, z-loss, muon": ("zero2", 8, GPT2, {**APART, "loss": Z_LOSS, "optimizer": MUON}),
    "llama, chunked loss, sources": ("zero1", 1, LLAMA, {"loss": CHUNKED, "data": TWO_SOURCES}),
    "llama, documents apart, muon": ("zero3", 8, LLAMA, {**APART, "optimizer": MUON}),
    "llama, adaptive clipping": ("zero0", 8, LLAMA, {"optimizer": BY_UNITS, "monitors": EVERY_MONITOR}),
    "qwen3, plain loss, clipping by value": ("zero2", 8, TIED, {**PLAIN_LOSS, "monitors": EVERY_MONITOR}),
    "qwen3, schedule-free": ("zero2", 1, TIED, {"training": FREE}),
    "qwen3 without DeepSpeed": ("null", 1, TIED, {}),
    "mixtral, router z-loss, muon": ("zero2", 1, MIXTRAL, {"loss": ROUTED, "optimizer": MUON}),
    "qwen3_moe, documents apart": ("zero1", 8, EXPERTS, {**APART, "loss": {"router_z_loss": 1e-3}}),
}


@pytest.mark.parametrize("ds_config, world_size, section, changed", CASES.values(), ids=CASES)
def test_a_step_waits_only_where_it_is_written(tmp_path, split, ds_config, world_size, section, changed):
    """Promise: nothing waits for the device between two steps, and no step mixes devices."""
    waits = last_step(tmp_path, split, ds_config, world_size, section, **changed)
    every_step = Counter({**EVERY_STEP[ds_config], **LOSS})
    measured = {where for where in waits.step if where in MEASURED}
    assert not measured or "monitors" in changed
    assert not waits.micro_batches
    assert waits.step - Counter({where: waits.step[where] for where in measured}) == every_step
    assert set(waits.logged) <= LOGGED
    assert every_step.total() <= MOST_A_STEP


class Operators(Watch):
    """Notes what the device does while gradients are summed up."""

    def __init__(self):
        self.seen = Counter()

    def operator(self, function, args, kwargs, result):
        names = {frame.name for frame in traceback.extract_stack(limit=12)}
        if names & {"_update_hp_grad", "partition_grads"} and not function.is_view:
            self.seen[function.overloadpacket.__name__] += 1


@pytest.mark.parametrize("ds_config", ["zero1", "zero3"])
def test_gradients_are_summed_up_by_one_kernel(tmp_path, split, ds_config):
    """No copy in fp32 first; the bits are the same, because a 16-bit value is exact in fp32."""
    watch = Operators()
    last_step(tmp_path, split, ds_config, 8, LLAMA, watch=watch)
    assert watch.seen["add_"] and set(watch.seen) <= {"add_", "copy_", "zero_"}
    sums, gradients = torch.randn(10_000), torch.randn(10_000).mul(1e-3).bfloat16()
    assert torch.equal(sums + gradients, sums + gradients.float())


def test_a_wait_that_is_not_written_is_found(tmp_path, split, monkeypatch):
    """A number of the loss that somebody reads in every micro-batch."""
    build_loss = losses.build_loss

    def reading(*args):
        loss = build_loss(*args)
        return lambda *each, **kwargs: _read(loss(*each, **kwargs))

    monkeypatch.setattr(losses, "build_loss", reading)
    waits = last_step(tmp_path, split, "zero1", 1, GPT2)
    assert waits.micro_batches == {"tests/training/test_fake_gpu.py:_read": 1}


def _read(loss: torch.Tensor) -> torch.Tensor:
    loss.item()
    return loss


def test_validation_and_samples_run_on_the_device(tmp_path, split, monkeypatch):
    """A validation waits for its sums, HellaSwag for its scores, each once; batches are copied without a wait."""
    tokenizer = WordTokenizer()
    items = [Item("a b", ("c", "d", "e", "f"), 0)]
    with watched_gpu(8) as machine:
        trainer = make_trainer(machine, written_recipe(tmp_path, LLAMA), split, "zero1")
        trained = trainer.model.to("cuda")
        machine.synchronisations.clear()
        trainer.evaluator.measure(trained, 0, lambda: False)
        HellaSwag(items, tokenizer, Passes(64, 4)).measure(trained)
        waits = [each.where.removeprefix("pretraining/evaluation/") for each in machine.synchronisations]
        assert waits == ["validation.py:measure", "scores.py:score"]
        unfinished = iter((True, True, False))  # made-up numbers would never say that a text has ended
        ended = lambda *args, **kwargs: next(unfinished)  # noqa: E731
        monkeypatch.setattr(type(trained), "_has_unfinished_sequences", ended)
        assert sample_text(trained, tokenizer, "a", 4)


class WordTokenizer:
    """Letters as tokens, as far as the evaluation asks."""

    bos_token_id = eos_token_id = 0

    def __call__(self, text: str, **_):
        return {"input_ids": [ord(letter) % 512 for letter in text]}

    def encode(self, text: str, **_) -> list[int]:
        return self(text)["input_ids"]

    def decode(self, ids, **_) -> str:
        return " ".join(map(str, ids))


def test_nccl_moves_no_tensor_of_the_host():
    with watched_gpu(8) as machine:
        dist.all_reduce(torch.zeros(3, device="cuda"))
        done = [(each.name, each.backend, each.bytes, each.group_size) for each in machine.collectives]
        assert done == [("all_reduce", "nccl", 12, 8)]
        with pytest.raises(RuntimeError, match="nccl moves tensors of cuda alone"):
            dist.all_reduce(torch.zeros(3))
        with pytest.raises(RuntimeError, match="gloo moves tensors of cpu alone"):
            dist.all_reduce(torch.zeros(3, device="cuda"), group=dist.new_group(backend="gloo"))


def test_a_mask_of_the_host_is_an_error():
    with watched_gpu(), pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device="cuda").masked_fill(torch.zeros(3, dtype=torch.bool), 0.0)


def test_each_read_of_the_device_is_recorded_with_its_place():
    with watched_gpu() as machine:
        tensor = torch.zeros(3, device="cuda")
        tensor.sum().item(), tensor.cpu(), bool(tensor[0]), tensor.nonzero(), tensor[tensor > 0]
        torch.cuda.synchronize(), torch.cuda.Event().synchronize(), torch.cuda.current_stream().synchronize()
        torch.zeros(3).to("cuda"), torch.zeros(3).pin_memory().to("cuda", non_blocking=True)
    kinds = [each.kind for each in machine.synchronisations]
    assert kinds == [
        *("item", "to host", "item", "nonzero", "nonzero", "device", "event", "stream", "to device"),
    ]
    name = test_each_read_of_the_device_is_recorded_with_its_place.__name__
    here = f"tests/training/test_fake_gpu.py:{name}"
    assert {each.where for each in machine.synchronisations} == {here}


def test_afterwards_there_is_no_gpu():
    with watched_gpu(8):
        assert torch.cuda.is_available() and dist.get_world_size() == 8
        assert torch.empty(1, device="cuda").is_cuda
    assert not torch.cuda.is_available() and not dist.is_initialized()
    assert not torch.accelerator.is_available()
    weights = torch.nn.Linear(2, 2)
    weights(torch.ones(1, 2)).sum().backward()
    assert weights.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
