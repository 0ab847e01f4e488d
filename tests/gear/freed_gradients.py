"""What a rank does in a test of ZeRO-2's streams: `python -m tests.gear.freed_gradients FOLDER`.

There is no GPU: DeepSpeed is told that its streams run by themselves, and each stream notes which memory it was given.
"""

import contextlib
import json
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from pretraining.training.ranks import join_ranks, leave_ranks

NUMEL = 100
"""Of each of two tensors: on three ranks each is cut, and one rank keeps no part of it."""
WAYS = {
    "larger than the bucket": {"reduce_bucket_size": NUMEL - 1},
    "as large as the bucket": {"reduce_bucket_size": NUMEL},
    "offloaded": {"reduce_bucket_size": NUMEL - 1, "offload_optimizer": {"device": "cpu"}},
}


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.ones(10, 10)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first @ self.second).float().sum()


class Stream:
    """A stream, or an event on one, that nobody has to wait for."""

    def _nothing(self, *_) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing


def stage_2(settings: dict) -> dict:
    return {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, **settings}


def freed_unprotected(settings: dict) -> int:
    """How many gradients one backward pass frees whose memory no stream was given and no bucket holds."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": stage_2(settings),
    }
    model = Weights().bfloat16()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    optimizer.reduction_stream, given, freed = Stream(), set(), []
    torch.Tensor.record_stream = lambda tensor, stream: given.add(address(tensor))
    clear = optimizer.clear_grad_attribute

    def note(parameter: torch.nn.Parameter) -> None:
        if parameter.grad is not None:
            buckets = {address(each) for bucket in optimizer.ipg_buckets.values() for each in bucket.buffer}
            owned = optimizer.is_param_in_current_partition[optimizer.get_param_id(parameter)]
            freed.append(not owned and address(parameter.grad) not in given | buckets)
        clear(parameter)

    optimizer.clear_grad_attribute = note
    engine.backward(engine(torch.ones(1, 10, dtype=torch.bfloat16)))
    return sum(freed)


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def main(folder: str) -> None:
    rank, _ = join_ranks()
    device = get_accelerator()
    device.resolves_data_dependency, device.synchronize = lambda: False, lambda *_: None
    device.current_stream = device.default_stream = lambda *_: Stream()
    device.stream = lambda _: contextlib.nullcontext()
    type(device).Event = Stream
    found = {name: freed_unprotected(settings) for name, settings in WAYS.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
