"""Promise: nothing committed is lost. Whatever an optimizer keeps, it goes on as if it had never stopped."""

import copy
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import Adafactor
from transformers.optimization import GreedyLR

from pretraining.checkpoints.live_state import LiveState, set_block
from pretraining.checkpoints.manager import PROGRESS, rank_tensors, schedule_state, set_schedule
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


def by_metric(kind: type, **settings) -> Any:
    """A schedule of one group, from rate 0.8."""
    return kind(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8), **settings)


def by_step(peak: float) -> LambdaLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    return LambdaLR(optimizer, lambda done: 1 / (done + 1))


def saved_schedule(scheduler: Any) -> dict:
    return json.loads(json.dumps(schedule_state(scheduler)))


def test_a_schedule_goes_on_where_it_was():
    """Through JSON; position and rates as saved, the peak as this run's recipe has it."""
    earlier = by_step(0.6)
    for _ in range(3):
        earlier.optimizer.step()
        earlier.step()
    saved = saved_schedule(earlier)
    later, lower = by_step(0.6), by_step(0.3)
    set_schedule(later, copy.deepcopy(saved), 3)
    set_schedule(lower, saved, 3)
    assert later.get_last_lr() == earlier.get_last_lr() == [0.6 / 4]
    assert lower.optimizer.param_groups[0]["lr"] == 0.3 / 4
    for schedule in (earlier, later):
        schedule.optimizer.step()
        schedule.step()
    assert later.optimizer.param_groups[0]["lr"] == earlier.optimizer.param_groups[0]["lr"]


LOSSES = [5.0, 4.0, 4.0, 4.1, 4.2, 3.0, 3.1, 3.2, 3.3, 3.4, 2.0, 1.0, 0.9]
JUDGED = {
    ReduceLROnPlateau: {"factor": 0.5, "patience": 1, "cooldown": 1, "min_lr": 0.01},
    GreedyLR: {
        "factor": 0.5,
        "patience": 1,
        "cooldown": 1,
        "warmup": 1,
        "min_lr": 0.2,
        "reset_start": 2,
        "smooth": True,
    },
}
OTHERS = {"factor": 0.25, "patience": 7, "cooldown": 3, "min_lr": 0.3, "threshold": 0.5, "eps": 0.125}


@pytest.mark.parametrize("kind", JUDGED)
@pytest.mark.parametrize("count", range(len(LOSSES)))
def test_a_schedule_by_losses_goes_on_where_it_was(kind, count):
    """After any number of validations its whole state is the same, and so are the rates from there on."""
    earlier, later = by_metric(kind, **JUDGED[kind]), by_metric(kind, **JUDGED[kind])
    for loss in LOSSES[:count]:
        earlier.step(loss)
    set_schedule(later, saved_schedule(earlier), 100)
    for loss in LOSSES[count:]:
        assert saved_schedule(later) == saved_schedule(earlier)
        earlier.step(loss)
        later.step(loss)
    assert saved_schedule(later) == saved_schedule(earlier)


@pytest.mark.parametrize("kind", JUDGED)
def test_changed_settings_of_a_schedule_by_losses_count(kind):
    """What the recipe says now is what a fresh schedule has; the checkpoint gives the rate and what was counted."""
    earlier = by_metric(kind, **JUDGED[kind])
    for loss in LOSSES[:5]:
        earlier.step(loss)
    rate = earlier.optimizer.param_groups[0]["lr"]
    fresh, later = (by_metric(kind, **JUDGED[kind] | OTHERS) for _ in range(2))
    set_schedule(later, saved_schedule(earlier), 100)
    for key, value in vars(fresh).items():
        if key not in (*PROGRESS, "_last_lr", "optimizer"):
            assert getattr(later, key) == value, key
    assert later.best == earlier.best and later.cooldown_counter == earlier.cooldown_counter
    assert later.get_last_lr() == [rate] and later.optimizer.param_groups[0]["lr"] == rate


def test_a_countdown_and_a_window_that_changed():
    """What GreedyLR has counted down stays counted; an average over another window begins anew."""
    settings = {**JUDGED[GreedyLR], "min_lr": 0.8, "reset_start": 10}
    earlier = by_metric(GreedyLR, **settings)
    for loss in (1.0, *[2.0] * 5):
        earlier.step(loss)
    counted = 10 - earlier.reset_start
    later = by_metric(GreedyLR, **settings | {"reset_start": 30, "window_size": 3})
    set_schedule(later, saved_schedule(earlier), 100)
    assert counted and later.reset_start == 30 - counted
    assert later._streaming_avg.values == [] and later._streaming_avg.window_size == 3


def test_a_schedule_of_another_kind_goes_on_at_the_run_s_step():
    """A validation is no step, and a step is no validation; the rate stays until the new one moves it."""
    plateau, steps = by_metric(ReduceLROnPlateau, factor=0.5, patience=0), by_step(0.8)
    for _ in range(3):
        plateau.step(1.0)
    set_schedule(steps, saved_schedule(plateau), 7)
    assert steps.last_epoch == 7 and steps.get_last_lr() == [0.8 / 8]
    later = by_metric(ReduceLROnPlateau, factor=0.5, patience=0)
    set_schedule(later, saved_schedule(steps), 7)
    assert later.optimizer.param_groups[0]["lr"] == 0.8 / 8
    later.step(1.0)
    later.step(1.0)
    assert later.optimizer.param_groups[0]["lr"] == 0.8 / 16


def test_rates_of_other_groups_are_refused():
    """A schedule by losses cannot say the rate of a group that it has not moved."""
    model = Model()
    saved = saved_schedule(ReduceLROnPlateau(torch.optim.SGD(groups_of(model), lr=0.8)))
    with pytest.raises(
        UserError, match=r"optimizer.groups: ReduceLROnPlateau has brought 2 groups .* now there are 1"
    ):
        set_schedule(by_metric(ReduceLROnPlateau), saved, 7)
