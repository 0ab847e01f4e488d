"""Promise: nothing committed is lost. Whatever an optimizer keeps, it goes on as if it had never stopped."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree
from transformers import Adafactor

from pretraining.checkpoints.live_state import LiveState, set_block
from pretraining.checkpoints.manager import rank_tensors, schedule_state, set_schedule
from pretraining.checkpoints.shard_files import CheckpointReader, rank_file, write_rank_file
from pretraining.errors import UserError
from pretraining.recipe.optimizer import AVERAGE, Optimizer
from pretraining.training.optimizers import counting_by_tensor, keep_average

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "fused AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "plain": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "schedule-free": lambda groups: counting_by_tensor(AdamWScheduleFree)(groups, lr=0.01),
    "Adafactor": lambda groups: Adafactor(groups, lr=0.01, relative_step=False, beta1=0.9),
}
AVERAGED = Optimizer(average_decay=0.9)


def averaging(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, which keeps an average of what it steps."""
    keep_average(optimizer, AVERAGED, lambda: 0)
    return optimizer


OPTIMIZERS["averaged"] = lambda groups: averaging(torch.optim.AdamW(groups, lr=0.01))


@pytest.fixture(autouse=True)
def one_rank(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SHAPES = {"weight": (6, 5), "bias": (6,)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(SHAPES["weight"]))
        self.bias = torch.nn.Parameter(torch.randn(SHAPES["bias"]))
        self.scale = torch.nn.Parameter(torch.tensor(1.5))


def groups_of(model: Model) -> list[dict]:
    return [{"params": [model.weight]}, {"params": [model.bias, model.scale], "weight_decay": 0.0}]


def step(model: Model, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def save(model: Model, optimizer: torch.optim.Optimizer, folder) -> CheckpointReader:
    live = LiveState(model, optimizer)
    write_rank_file(folder / rank_file(0, 1), dict(rank_tensors(live)))
    scalars = {name: block.scalars() for block in live.blocks for name in block.parameters if block.state}
    table = {name: {"shape": list(p.shape), "dtype": "float32"} for name, p in model.named_parameters()}
    state = {"format": 1, "parameters": table, "scalars": scalars}
    (folder / "state.json").write_text(json.dumps(state))
    return CheckpointReader(folder)


def load(model: Model, optimizer: torch.optim.Optimizer, reader: CheckpointReader) -> None:
    with torch.no_grad():
        for block in LiveState(model, optimizer).blocks:
            set_block(block, reader)


def trained_and_continued(tmp_path, name: str, steps_before_load: int) -> tuple[list, list]:
    """Parameters after five steps, and those of a model that took over after three; it may have had other states."""
    model, other = Model(), Model()
    optimizer, fresh = OPTIMIZERS[name](groups_of(model)), OPTIMIZERS[name](groups_of(other))
    for seed in range(3):
        step(model, optimizer, seed)
    for seed in range(steps_before_load):
        step(other, fresh, 100 + seed)
    load(other, fresh, save(model, optimizer, tmp_path))
    for seed in (3, 4):
        step(model, optimizer, seed)
        step(other, fresh, seed)
    return list(model.parameters()), list(other.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before_load", [0, 2])
def test_any_optimizer_goes_on_bit_for_bit(tmp_path, name, steps_before_load):
    """Saved after three steps, set in a fresh one or over another's states: the next two steps are the same."""
    assert all(map(torch.equal, *trained_and_continued(tmp_path, name, steps_before_load)))


def test_an_average_that_no_checkpoint_holds_begins_as_the_weights(tmp_path):
    """Switched on at a resume, after steps without one; what no gradient had reached yet has none."""
    model, other = Model(), Model()
    optimizer, fresh = (
        OPTIMIZERS[name](groups_of(each)) for name, each in (("AdamW", model), ("averaged", other))
    )
    step(model, optimizer, 0)
    load(other, fresh, save(model, optimizer, tmp_path))
    for parameter in other.parameters():
        average = fresh.state[parameter][AVERAGE]
        assert torch.equal(average, parameter.detach()) and average.data_ptr() != parameter.data_ptr()


QUANTISED = ("AdamW8bit", "PagedAdamW8bit", "AdEMAMix8bit", "PagedAdEMAMix8bit", "Lion8bit", "RMSprop8bit")


@pytest.fixture
def in_8_bits(monkeypatch):
    """bitsandbytes' optimizers by name, for tensors that they quantise, of which one stays in 32 bits.

    The Trainer asks for that in embeddings, and bitsandbytes finds their places at its first step.
    """
    bitsandbytes = pytest.importorskip("bitsandbytes")
    monkeypatch.setitem(SHAPES, "weight", (128, 64))
    monkeypatch.setitem(SHAPES, "bias", (64, 128))
    monkeypatch.setattr(bitsandbytes.optim.GlobalOptimManager, "_instance", None)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    build = Model.__init__

    def with_override(model: Model) -> None:
        build(model)
        manager.register_module_override(model, "bias", {"optim_bits": 32})

    monkeypatch.setattr(Model, "__init__", with_override)
    for name in (*QUANTISED, "AdamW32bit"):
        optimizer = getattr(bitsandbytes.optim, name)
        monkeypatch.setitem(OPTIMIZERS, name, lambda groups, optimizer=optimizer: optimizer(groups, lr=0.01))


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("steps_before_load", [0, 2])
def test_8_bit_states_go_on_bit_for_bit(tmp_path, in_8_bits, name, steps_before_load):
    """bitsandbytes quantises from 4,096 elements on: bytes, scales and tables come back as they were."""
    assert all(map(torch.equal, *trained_and_continued(tmp_path, name, steps_before_load)))


def test_codes_of_8_bits_are_not_read_as_values(tmp_path, in_8_bits):
    """The same optimizer in 32 bits has states of the same names."""
    model, other = Model(), Model()
    optimizer, fresh = OPTIMIZERS["AdamW8bit"](groups_of(model)), OPTIMIZERS["AdamW32bit"](groups_of(other))
    step(model, optimizer, 0)
    with pytest.raises(UserError, match=r"of weight, and AdamW32bit .* needs state1 in float32"):
        load(other, fresh, save(model, optimizer, tmp_path))


def test_states_of_another_optimizer_are_refused(tmp_path):
    """Adam has no use for a momentum alone: one line that names both, no silent start from zero."""
    model = Model()
    optimizer = OPTIMIZERS["momentum"](groups_of(model))
    step(model, optimizer, 0)
    reader = save(model, optimizer, tmp_path)
    with pytest.raises(UserError, match=r"has master, momentum_buffer of weight, and AdamW .* needs exp_avg"):
        load(model, OPTIMIZERS["AdamW"](groups_of(model)), reader)


def test_a_schedule_goes_on_where_it_was():
    """Through JSON; position and rates as saved, the peak as this run's recipe has it."""

    def build(rate: float):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (done + 1))

    earlier = build(0.6)
    for _ in range(3):
        earlier.optimizer.step()
        earlier.step()
    saved = json.loads(json.dumps(schedule_state(earlier)))
    later, lower = build(0.6), build(0.3)
    set_schedule(later, copy.deepcopy(saved))
    set_schedule(lower, saved)
    assert later.get_last_lr() == earlier.get_last_lr() == [0.6 / 4]
    assert lower.optimizer.param_groups[0]["lr"] == 0.3 / 4
    for schedule in (earlier, later):
        schedule.optimizer.step()
        schedule.step()
    assert later.optimizer.param_groups[0]["lr"] == earlier.optimizer.param_groups[0]["lr"]
