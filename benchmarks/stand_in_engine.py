"""DeepSpeed's engine around a few layers, without other ranks: bytes it moves, waits it makes, what it sends."""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

WIDTH, DEPTH = 512, 8


def count_engine(ds_config: dict | None, world_size: int) -> dict[str, float]:
    """Bytes for each parameter that DeepSpeed's engine moves on one of `world_size` ranks: a micro-batch, a step.

    A small stack of layers is trained for real. The process group answers at once and sends nothing.
    """
    from kernels import OTHER, Kernels

    engine, parameters = stand_in_engine(ds_config, world_size)
    kernels, phases = Kernels(), ("first", "second", "last", "step")
    for _ in range(3):  # the first two steps make buffers
        kernels.work.clear()
        with kernels:
            list(train_step(engine, kernels, phases))
    moved = {phase: kernels.sum(phase, OTHER).bytes / parameters for phase in phases}
    micro_batch = moved["second"]
    return {"micro-batch": micro_batch, "step": sum(moved.values()) - 3 * micro_batch}


def train_step(engine, kernels, phases: tuple[str, ...]) -> Iterator[str]:
    """One optimizer step; `phases` name its micro-batches, and last the step itself. Yields each when it is over."""
    import torch

    batch = torch.zeros(2, WIDTH, dtype=torch.bfloat16, device=engine.device)
    *micro_batches, step = phases
    for phase in micro_batches:
        kernels.phase = phase
        loss = engine(batch).float().sum()
        engine.set_gradient_accumulation_boundary(phase == micro_batches[-1])
        engine.backward(loss)
        yield phase
    kernels.phase = step
    engine.step()
    yield step


def stand_in_engine(ds_config: dict | None, world_size: int):
    """(DeepSpeed's engine around a few layers as rank 0 of `world_size`, their parameters)."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    name_ranks(world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    return initialised_engine(ds_config, "cpu"), DEPTH * WIDTH**2


def name_ranks(world_size: int) -> None:
    """What a launcher tells a rank."""
    os.environ.update(RANK="0", LOCAL_RANK="0", LOCAL_SIZE=str(world_size), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def initialised_engine(ds_config: dict | None, device: str):
    """DeepSpeed's engine as a run configures it, around a stack of linear layers."""
    import deepspeed
    import torch

    from pretraining.recipe import load_recipe
    from pretraining.training.arguments import engine_config
    from pretraining.upstream.deepspeed import leave_out_shared_memory

    leave_out_shared_memory()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = without_auto(engine_config(load_recipe("tiny", ["training.bf16=true"]), ds_config))
    config |= {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
    }
    config["bf16"] = {**config.get("bf16", {}), "enabled": "torch_autocast" not in config}
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    stack = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
    layers = torch.nn.Sequential(*stack).to(device, dtype)
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    return deepspeed.initialize(model=layers, optimizer=optimizer, config=config)[0]


def count_waits(ds_config: dict | None, world_size: int) -> dict:
    """How often the host waits for the device in DeepSpeed's engine, and what a step sends, on a GPU that is none."""
    from pretraining.upstream.deepspeed import keep_norm_at_stage_0, mend_optimizer
    from tests.gear.watched_gpu import watched_gpu

    name_ranks(world_size)
    with watched_gpu(world_size) as machine:
        engine = initialised_engine(ds_config, "cuda")
        keep_norm_at_stage_0(engine, lambda norm: None)
        mend_optimizer(engine.optimizer)
        counted_phases = SimpleNamespace(phase="")
        waits: dict[str, int] = {}
        for _ in range(3):
            waits.clear()
            machine.synchronisations.clear()
            machine.collectives.clear()
            for phase in train_step(engine, counted_phases, ("first", "second", "last", "step")):
                waits[phase] = len(machine.synchronisations)
        engine.destroy()
    passes = waits["second"] - waits["first"]
    sent = dict(Counter(collective.name for collective in machine.collectives))
    return {"a micro-batch": passes, "a step": waits["step"] - 3 * passes, "collectives a step": sent}


def without_auto(config: dict) -> dict:
    """The ds_config without the values that the Trainer fills in, and without offloading, which is no kernel."""
    return {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto" and not key.startswith("offload_")
    }
