"""Train blocks as they are and compiled under ZeRO, on the ranks of one launch."""

import io
from contextlib import redirect_stderr
from dataclasses import replace
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import (
    AllGatherCoalescedHandle,
    AllGatherHandle,
    ZeroParamStatus,
)
from deepspeed.utils import safe_get_full_grad
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.integrations import HfDeepSpeedConfig

from pretraining.ds_config import NOT_SPLIT, Degrees
from pretraining.model.build import blocks_of, build_model
from pretraining.model.loss import build_loss
from pretraining.planning.memory.states import block_gathering
from pretraining.recipe import load_recipe
from pretraining.recipe.sections import Speed
from pretraining.runtime.process_group import rank_groups
from pretraining.training.arguments import split_layers
from pretraining.upstream.split_weights import expert_groups_of
from tests.gear.runs import MODELS, TOKENIZER

PLAIN = Speed(compile="none")
LAYERS = 4


def fails_on_rank_1(graph, inputs):
    """A backend that works on one rank alone."""
    if dist.get_rank() == 1:
        raise RuntimeError("no space left on device")
    return graph.forward


# {case: (model, stage, layers are recomputed, speed, degrees)}; the first of a model and stage is what the others must
# equal.
BLOCKS = {"compile": "blocks"}
# as inductor cuts a graph in two, without the seconds of a C++ compiler: the first case has these too
CUT = {**BLOCKS, "compile_backend": "aot_eager_decomp_partition"}
EAGER = {**BLOCKS, "compile_backend": "aot_eager"}
FAILING = {"compile": "auto", "compile_backend": fails_on_rank_1}
SPLIT_LAYERS, SPLIT_EXPERTS = Degrees(tensor=2), Degrees(expert=2)
CASES = {
    "gpt2": ("gpt2", 3, False, {}),
    "gpt2 blocks": ("gpt2", 3, False, BLOCKS),
    "gpt2 blocks recomputed": ("gpt2", 3, True, CUT),
    "llama": ("llama", 3, False, {}),
    "llama blocks": ("llama", 3, False, CUT),
    "qwen3_moe": ("qwen3_moe", 3, False, {}),
    "qwen3_moe blocks": ("qwen3_moe", 3, False, EAGER),
    "gpt2 failing": ("gpt2", 3, False, FAILING),
    "gpt2 zero2": ("gpt2", 2, False, {}),
    "gpt2 zero2 failing": ("gpt2", 2, False, FAILING),
    "qwen3_moe expert": ("qwen3_moe", 3, False, {}, SPLIT_EXPERTS),
    "qwen3_moe expert blocks": ("qwen3_moe", 3, False, EAGER, SPLIT_EXPERTS),
    "qwen3_moe blocks recomputed": ("qwen3_moe", 3, True, EAGER),
    "qwen3_moe expert recomputed": ("qwen3_moe", 3, True, {}, SPLIT_EXPERTS),
    "qwen3_moe expert blocks recomputed": ("qwen3_moe", 3, True, CUT, SPLIT_EXPERTS),
    "qwen3_moe expert failing": ("qwen3_moe", 3, True, FAILING, SPLIT_EXPERTS),
    # last, because AutoTP leaves traces in the process
    "llama tensor": ("llama", 2, False, {}, SPLIT_LAYERS),
    "llama tensor blocks": ("llama", 2, False, BLOCKS, SPLIT_LAYERS),
    "llama tensor failing": ("llama", 2, False, FAILING, SPLIT_LAYERS),
}


class Gathered:
    """Weights that ZeRO-3 has gathered: how many elements it thinks are there, and how many any tensor still holds.

    singly: count those too that are gathered alone. gloo's thread may hold the last of them for a moment.
    """

    def __init__(self, singly: bool = False):
        self.storages: list[tuple[StorageWeakRef, int]] = []
        wait = AllGatherCoalescedHandle.wait

        def noting(handle, **keywords):
            is_new = not handle.complete
            wait(handle, **keywords)
            if is_new:
                self.storages += [
                    (StorageWeakRef(p.data.untyped_storage()), p.ds_numel) for p in handle.params
                ]

        AllGatherCoalescedHandle.wait = noting
        wait_for_one = AllGatherHandle.wait

        def noting_one(handle, **keywords):
            is_new, parameter = not handle._AllGatherHandle__complete, handle._AllGatherHandle__param
            wait_for_one(handle, **keywords)
            if is_new:
                self.storages.append((StorageWeakRef(parameter.data.untyped_storage()), parameter.ds_numel))

        if singly:
            AllGatherHandle.wait = noting_one

    def held(self) -> int:
        self.storages = [(storage, numel) for storage, numel in self.storages if not storage.expired()]
        return sum(numel for _, numel in self.storages)


def available(model) -> int:
    """Elements of weights that ZeRO-3 holds gathered at this moment."""
    found = (p for p in model.parameters() if hasattr(p, "ds_status"))
    return sum(p.ds_numel for p in found if p.ds_status == ZeroParamStatus.AVAILABLE)


def trained(
    gathered: Gathered,
    name: str,
    stage: int,
    recomputes: bool,
    speed: dict,
    degrees: Degrees = NOT_SPLIT,
    bf16: bool = False,
) -> dict:
    """Losses of four steps with a validation in between, the first gradients, graphs, and weights held too long."""
    torch._dynamo.reset()
    counters.clear()
    depth = "n_layer" if name == "gpt2" else "num_hidden_layers"
    section = {**MODELS[name], depth: LAYERS}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    zero |= {"reduce_bucket_size": 20_000} | (block_gathering({}, 50_000) if stage == 3 else {})
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    if bf16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    if degrees.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": degrees.tensor, "partition_config": split_layers(section)}
    alive, groups = HfDeepSpeedConfig(config), rank_groups(degrees)
    arguments = SimpleNamespace(bf16=bf16, fp16=False, deepspeed=config, process_index=1, seed=7)
    model = build_model(section, TOKENIZER, arguments, speed=replace(PLAIN, **speed), groups=groups).train()
    if recomputes:
        model.activation_checkpointing_enable({"use_reentrant": False})
    loss = build_loss(model, load_recipe("features/gpt2").loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.param_groups[:] = expert_groups_of(optimizer.param_groups)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    order, inside = torch.Generator().manual_seed(groups.data_rank), []
    for block in blocks_of(model):
        block.register_forward_hook(lambda *_: inside.append(gathered.held() - available(model)))
    found = {"losses": [], "gathered": []}
    for step in range(4):
        ids = torch.randint(512, (2, 64), generator=order)
        outputs = engine(input_ids=ids)
        found["gathered"].append(available(model))
        here = loss(outputs, ids.roll(-1, 1))
        engine.backward(here)
        if step == 0 and degrees == NOT_SPLIT:
            found["gradients"] = {n: safe_get_full_grad(p).clone() for n, p in model.named_parameters()}
        engine.step()
        found["losses"].append(here.item())
        if step == 2:
            with torch.no_grad():
                model.eval()
                engine(input_ids=ids[:1, :9])
                model.train()
    found |= {"held_too_long": max(inside), "graphs": counters["stats"]["unique_graphs"]}
    found["graph_break"] = dict(counters["graph_break"])
    engine.destroy()
    del alive
    return found


def trained_in_all_ways() -> tuple[dict[str, dict], str]:
    """{case: what `trained` finds on this rank}, and what it says meanwhile."""
    gathered, said = Gathered(), io.StringIO()
    with redirect_stderr(said):
        return {case: trained(gathered, *CASES[case]) for case in CASES}, said.getvalue()
