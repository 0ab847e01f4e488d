"""The GPU that is none: what runs on it mixes no devices, and what makes the host wait is on a written list."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from pretraining.upstream.fake_gpu import fake_gpu

STEPS, MICRO_BATCHES = 3, 4


def ds_config(stage: int, **zero) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {"stage": stage, "contiguous_gradients": True, "overlap_comm": True, **zero},
    }


def small_model() -> torch.nn.Module:
    small = {"vocab_size": 64, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0, use_cache=False))


def waits_of_each_micro_batch(machine, config: dict) -> list[list[str]]:
    """Of the last step: where the host waited for the device."""
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=config["zero_optimization"]["stage"] == 3):
        model = small_model()
    model = model.to(torch.bfloat16).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    tokens, found = torch.zeros(1, 8, dtype=torch.long, device="cuda"), []
    for micro_batch in range(STEPS * MICRO_BATCHES):
        machine.synchronisations.clear()
        last = micro_batch % MICRO_BATCHES == MICRO_BATCHES - 1
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss)
        if last:
            engine.step()
        found.append([each.where for each in machine.synchronisations])
    engine.destroy()
    return found[-MICRO_BATCHES:]


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_micro_batch_that_closes_no_step_does_not_wait(stage, world_size):
    """Promise: nothing waits for the device between two steps."""
    with fake_gpu(world_size) as machine:
        *others, _ = waits_of_each_micro_batch(machine, ds_config(stage, overlap_comm=False))
    assert others == [[]] * (MICRO_BATCHES - 1)


def test_the_wait_at_the_end_of_each_backward_pass_is_found():
    """DeepSpeed's ZeRO-2 waits for the whole device there if it overlaps communication."""
    with fake_gpu(8) as machine:
        first, *_ = waits_of_each_micro_batch(machine, ds_config(2, overlap_comm=True))
    where = "deepspeed/runtime/zero/stage_1_and_2.py:independent_gradient_partition_epilogue"
    assert first == [where]


def test_nccl_moves_no_tensor_of_the_host():
    with fake_gpu(8) as machine:
        dist.all_reduce(torch.zeros(3, device="cuda"))
        assert [(each.name, each.bytes, each.group_size) for each in machine.collectives] == [
            ("all_reduce", 12, 8)
        ]
        with pytest.raises(RuntimeError, match="nccl moves tensors of cuda alone"):
            dist.all_reduce(torch.zeros(3))
        with pytest.raises(RuntimeError, match="gloo moves tensors of cpu alone"):
            dist.all_reduce(torch.zeros(3, device="cuda"), group=dist.new_group(backend="gloo"))


def test_a_tensor_of_the_host_among_those_of_the_device_is_an_error():
    with fake_gpu(), pytest.raises(RuntimeError, match="two devices"):
        torch.zeros(3, device="cuda") + torch.zeros(3)


def test_each_read_of_the_device_is_recorded_with_its_place():
    with fake_gpu() as machine:
        tensor = torch.zeros(3, device="cuda")
        tensor.sum().item(), tensor.cpu(), bool(tensor[0]), tensor.nonzero(), tensor[tensor > 0]
        torch.cuda.synchronize(), torch.cuda.Event().synchronize(), torch.cuda.current_stream().synchronize()
        torch.zeros(3).to("cuda"), torch.zeros(3).pin_memory().to("cuda", non_blocking=True)
    kinds = [each.kind for each in machine.synchronisations]
    assert kinds == [
        "item",
        "to host",
        "item",
        "nonzero",
        "nonzero",
        "device",
        "event",
        "stream",
        "to device",
    ]
    function = test_each_read_of_the_device_is_recorded_with_its_place.__name__
    assert {each.where for each in machine.synchronisations} == {f"tests/test_fake_gpu.py:{function}"}


def test_afterwards_there_is_no_gpu():
    with fake_gpu(8):
        assert torch.cuda.is_available() and dist.get_world_size() == 8
        assert torch.empty(1, device="cuda").is_cuda
    assert not torch.cuda.is_available() and not dist.is_initialized()
    assert not torch.accelerator.is_available()
    weights = torch.nn.Linear(2, 2)
    weights(torch.ones(1, 2)).sum().backward()
    assert weights.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
