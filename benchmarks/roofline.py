"""How near to a GPU's peak a recipe can come: its kernels counted, at the rates a GPU sustains. Needs no GPU.

    python benchmarks/roofline.py 124m
    python benchmarks/roofline.py 7b --deepspeed zero3 --gpu H200 --world_size 8 --top 20
    python benchmarks/roofline.py 1.5b --set model.activation_function=gelu_new --compile none
    python benchmarks/roofline.py --table

The recipe's own model, loss and blocks run forward and backward at full size on tensors without storage, eager or as
inductor would fuse them; the DeepSpeed engine runs on a small stack of layers, as one rank of --world_size, and its
bytes are taken for each parameter. Products and attention take their FLOPs' time, all others their bytes' time, at the
shares of the GPU's peaks that pretraining/planning/tables/rates.json assumes. There is no gap between two kernels and
no wait in it: a run stays below this ceiling. `planned_mfu_ceiling` is the plan's, which runs nothing.

--table counts each family's layers, loss and engines anew and writes pretraining/planning/tables/kernels.json, the
factors that plans use.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from record import REPOSITORY, parser_of, record

TABLE = REPOSITORY / "pretraining" / "planning" / "tables" / "kernels.json"

TOKENIZER = SimpleNamespace(bos_token_id=0, eos_token_id=0)
MODES = {"eager": "none", "compiled": "blocks"}
"""Of the table: what `speed.compile` says."""
BATCH, LENGTH = 4, 1024
TOKENS = BATCH * LENGTH
ENGINE_WIDTH, ENGINE_LAYERS = 512, 8
LAYERS = {"gpt2": "n_layer"}


def dense(family: str, widths: list[tuple[int, int, int, int]], **more) -> list[dict]:
    """Model sections of these hidden, query, key and inner widths, with heads of 64."""
    return [
        {
            "model_type": family,
            "vocab_size": 1024,
            "hidden_size": hidden,
            "num_attention_heads": queries // 64,
            "num_key_value_heads": keys // 64,
            "head_dim": 64,
            "intermediate_size": inner,
            "max_position_embeddings": LENGTH,
            **more,
        }
        for hidden, queries, keys, inner in widths
    ]


def gpt2(hidden: int, inner: int) -> dict:
    """A model section with its activation in one kernel."""
    widths = {"n_embd": hidden, "n_inner": inner, "n_head": hidden // 64, "n_positions": LENGTH}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    activation = {"activation_function": "gelu_pytorch_tanh"}
    return {"model_type": "gpt2", "vocab_size": 1024, **widths, **dropouts, **activation}


DENSE = [(512, 512, 512, 1024), (1024, 512, 512, 1024), (512, 1024, 512, 1024), (512, 512, 256, 1024)]
DENSE += [(512, 512, 512, 2048), (1024, 1024, 256, 1536)]
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.01}
SHAPES = {
    "gpt2": [gpt2(512, 1024), gpt2(512, 2048), gpt2(1024, 1024), gpt2(768, 3072)],
    "llama": dense("llama", DENSE),
    "qwen3": dense("qwen3", DENSE),
    "mixtral": [
        section
        for chosen, widths in ((2, DENSE), (4, DENSE[:2]), (3, DENSE[:1]))
        for section in dense("mixtral", widths, num_local_experts=8, num_experts_per_tok=chosen, **ROUTED)
    ],
}
SHAPES["qwen3_moe"] = [
    {
        **{key: value for key, value in section.items() if key != "num_local_experts"},
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "moe_intermediate_size": section["intermediate_size"],
    }
    for section in SHAPES["mixtral"]
]
"""Of each family, shapes that differ in one width at a time."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("recipe", nargs="?", default="124m")
    parser.add_argument("--deepspeed")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--world_size", type=int, default=8)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument(
        "--compile", choices=("none", "blocks", "whole"), help="instead of what a GPU would get"
    )
    parser.add_argument("--top", type=int, default=10, help="kernels to list")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--families", nargs="+", choices=SHAPES, default=list(SHAPES), help="of the table")
    options = parser.parse_args()
    if options.table:
        return write_table(options.families)
    record("roofline", ceiling_of(options), options.keep)


def ceiling_of(options: argparse.Namespace) -> dict:
    """The counted ceiling of a recipe, which kernels cost it, and what the plan says."""
    from pretraining.planning.flops import flops_per_token
    from pretraining.planning.gpus import find_gpu
    from pretraining.planning.roofline import ceiling, layer_mode, sustained_rates
    from pretraining.planning.sizes import model_size
    from pretraining.planning.step_time import precision_of_products
    from pretraining.recipe import accumulation_steps
    from pretraining.refusals import load_run

    changes = [*options.set, *([f"speed.compile={options.compile}"] if options.compile else [])]
    recipe, ds_config = load_run(options.recipe, changes, options.deepspeed, options.world_size)
    gpu, precision = find_gpu(options.gpu), precision_of_products(recipe)
    rates, size = sustained_rates(gpu, precision), model_size(recipe.model)
    planned = ceiling(recipe, ds_config, options.world_size, gpu, precision)
    kernels = count_pass(recipe, MODES[layer_mode(recipe, ds_config)], gpu)
    waits = count_waits(ds_config, options.world_size)
    engine = count_engine(ds_config, options.world_size)

    seconds = {kernel: seconds_of(kernel, work, rates) for kernel, work in kernels.work.items()}
    parts: dict[str, float] = {}
    for kernel, spent in seconds.items():
        part = f"{kernel.phase}: {kernel.kind}"
        parts[part] = parts.get(part, 0.0) + spent
    parts["gradients"] = engine["micro-batch"] * size.total / rates.bytes
    accumulation = accumulation_steps(recipe, options.world_size)
    parts["optimizer"] = engine["step"] * size.total / rates.bytes / accumulation
    total = sum(parts.values())
    tokens = recipe.micro_batch * recipe.sequence_length
    at_peak = flops_per_token(size, recipe.sequence_length).training * tokens / gpu.peak_flops(precision)
    costliest = sorted(seconds, key=seconds.get, reverse=True)[: options.top]
    return {
        "recipe": recipe.name,
        "deepspeed": recipe.deepspeed,
        "gpu": gpu.name,
        "world_size": options.world_size,
        "mfu_ceiling": round(at_peak / total, 4),
        "planned_mfu_ceiling": round(planned.mfu, 4),
        "micro_batch_seconds": round(total, 5),
        "seconds": {part: round(spent, 5) for part, spent in parts.items()},
        "launches": kernels.sum().launches,
        "waits_of_engine": waits,
        "kernels": [
            {
                **vars(kernel),
                **vars(kernels.work[kernel]),
                "seconds": round(seconds[kernel], 6),
            }
            for kernel in costliest
        ],
    }


def seconds_of(kernel, work, rates) -> float:
    """Of all launches of a kernel: its FLOPs or its bytes, whichever take longer."""
    from kernels import ATTENTION, PRODUCT

    peaks = {PRODUCT: rates.product_flops, ATTENTION: rates.attention_flops}
    return max(work.flops / peaks.get(kernel.kind, rates.product_flops), work.bytes / rates.bytes)


def count_pass(recipe, compiles: str, gpu):
    """The kernels of one micro-batch of the recipe, by phase: forward, loss, backward."""
    import torch

    from pretraining.model import build_loss
    from pretraining.planning.memory.loss import chunk_length, compiles_loss, logit_bytes
    from pretraining.planning.memory.need import recomputed_one_in

    tokens, compiled = (
        recipe.micro_batch * recipe.sequence_length,
        compiles_loss(recipe.loss["compile"], on_gpu=True),
    )
    vocab_size, own = recipe.model["vocab_size"], recipe.loss["chunk_tokens"]
    chunk = chunk_length(tokens, vocab_size, logit_bytes(2, compiled), gpu.memory_bytes, own)
    with counted_model(recipe.model, compiles) as (model, kernels):
        if recomputed_one_in(recipe):
            model.activation_checkpointing_enable(every_n_layers=recomputed_one_in(recipe))
        loss = build_loss(model, {**recipe.loss, "chunk_tokens": chunk, "compile": compiled})
        ids = torch.zeros(recipe.micro_batch, recipe.sequence_length, dtype=torch.long)
        num_items = torch.ones(())

        def run() -> None:
            kernels.phase = "forward"
            outputs = model(input_ids=ids, num_items_in_batch=num_items)
            kernels.phase = "loss"
            found = loss(outputs, ids, num_items_in_batch=num_items)
            kernels.phase = "backward"
            found.backward()
            model.zero_grad()

        return counted(run, kernels)


@contextmanager
def counted_model(section: dict, compiles: str) -> Iterator[tuple]:
    """(the model on stand-in tensors in bf16, the Kernels that count it), compiled as a run's would be."""
    import torch
    from kernels import Kernels, counting_compiler, stand_in_tensors
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from pretraining.model import cross_entropy
    from pretraining.model.attention import SDPA_CAUSAL
    from pretraining.model.build import build_config
    from pretraining.model.compiling import compile_model

    AttentionInterface.register(SDPA_CAUSAL, sdpa_attention_forward)
    kernels = Kernels()
    as_on_gpu = mock.patch.object(cross_entropy, "_adds_in_fp32", lambda device: True)
    with stand_in_tensors(), counting_compiler(kernels), as_on_gpu:
        cross_entropy._can_compile.cache_clear()
        cross_entropy._compiled.cache_clear()
        config = build_config({**section, "attn_implementation": SDPA_CAUSAL}, TOKENIZER)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        model.loss_type = None
        compile_model(model, {"compile": compiles, "compile_backend": "inductor", "compile_mode": None})
        yield model, kernels


def counted(run, kernels):
    """`kernels` of a second call; the first one compiles, which asks for kernels of its own."""
    run()
    kernels.work.clear()
    with kernels:
        run()
    return kernels


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

    batch = torch.zeros(2, ENGINE_WIDTH, dtype=torch.bfloat16, device=engine.device)
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
    return initialised_engine(ds_config, "cpu"), ENGINE_LAYERS * ENGINE_WIDTH**2


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
    from pretraining.training.ranks import leave_out_shared_memory

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
    stack = (torch.nn.Linear(ENGINE_WIDTH, ENGINE_WIDTH, bias=False) for _ in range(ENGINE_LAYERS))
    layers = torch.nn.Sequential(*stack).to(device, dtype)
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
    return deepspeed.initialize(model=layers, optimizer=optimizer, config=config)[0]


def count_waits(ds_config: dict | None, world_size: int) -> dict:
    """How often the host waits for the device in DeepSpeed's engine, and what a step sends, on a GPU that is none."""
    from pretraining.training.stage_0_norm import tell_norm_at_stage_0
    from pretraining.upstream.fake_gpu import fake_gpu
    from pretraining.upstream.gradient_norm import read_norm_once

    name_ranks(world_size)
    with fake_gpu(world_size) as machine:
        engine = initialised_engine(ds_config, "cuda")
        tell_norm_at_stage_0(engine, lambda norm: None)
        read_norm_once(engine.optimizer)
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
    sent: dict[str, int] = {}
    for collective in machine.collectives:
        sent[collective.name] = sent.get(collective.name, 0) + 1
    return {"a micro-batch": passes, "a step": waits["step"] - 3 * passes, "collectives a step": sent}


def without_auto(config: dict) -> dict:
    """The ds_config without the values that the Trainer fills in, and without offloading, which is no kernel."""
    return {
        key: without_auto(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value != "auto" and not key.startswith("offload_")
    }


def write_table(families: list[str]) -> None:
    """Count the factors of tables/kernels.json: the layers of these families, and all else."""
    values = json.loads(TABLE.read_text(encoding="utf-8"))
    layers = values["layers"]
    for family in families:
        for mode, compiles in MODES.items():
            layers.setdefault(family, {})[mode] = layer_factors(family, compiles)
            print(family, mode, layers[family][mode], file=sys.stderr, flush=True)
    values |= {"activations": activation_factors(layers["gpt2"]), "loss": loss_factors()}
    values |= {"engines": engine_factors()}
    TABLE.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def layer_factors(family: str, compiles: str, **changes) -> dict:
    """Bytes for a token and each of its widths: those of a model's third layer, for several widths, solved."""
    from kernels import OTHER

    from pretraining.planning.roofline import layer_widths
    from pretraining.planning.stand_in import shape_of

    rows, moved = [], {"forward": [], "backward": []}
    for shape in SHAPES[family]:
        section = {**shape, **changes}
        two, three = (
            count_layers({**section, LAYERS.get(family, "num_hidden_layers"): layers}, compiles)
            for layers in (2, 3)
        )
        widths = layer_widths(shape_of(section), TOKENS)
        rows.append(list(widths.values()))
        for phase, bytes_moved in moved.items():
            bytes_moved.append((three.sum(phase, OTHER).bytes - two.sum(phase, OTHER).bytes) / TOKENS)
    factors = {}
    for phase, bytes_moved in moved.items():
        factors[phase] = solved(tuple(widths), rows, bytes_moved)
        factors[f"{phase} launches"] = three.sum(phase).launches - two.sum(phase).launches
    own = 3 * two.sum(kind=OTHER).bytes - 2 * three.sum(kind=OTHER).bytes
    factors["outside"] = round(own / TOKENS / widths["hidden"], 2)
    return factors


def solved(names: tuple[str, ...], rows: list[list[float]], moved: list[float]) -> dict[str, float]:
    """The factor of each name, for which every row's sum is what was moved."""
    import numpy as np

    found, *_ = np.linalg.lstsq(np.array(rows, float), np.array(moved), rcond=None)
    off = max(abs(np.array(rows) @ found / moved - 1))
    assert off < 0.02, f"bytes are not linear in {names}: {off:.1%} off, {found}"
    return {name: round(float(factor), 2) for name, factor in zip(names, found, strict=False)}


def count_layers(section: dict, compiles: str):
    """The kernels of a model without its loss."""
    import torch

    with counted_model(section, compiles) as (model, kernels):
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)

        def run() -> None:
            kernels.phase = "forward"
            hidden = model.base_model(input_ids=ids).last_hidden_state
            kernels.phase = "backward"
            hidden.backward(torch.empty_like(hidden))
            model.zero_grad()

        return counted(run, kernels)


def activation_factors(gpt2_layers: dict) -> dict:
    """What an activation that is written out in Python moves beyond one kernel, for each inner element."""
    written_out = {
        mode: layer_factors("gpt2", how, activation_function="gelu_new") for mode, how in MODES.items()
    }
    return {
        "gelu_new": {
            mode: {
                phase: round(factors[phase]["inner"] - gpt2_layers[mode][phase]["inner"], 2)
                for phase in ("forward", "backward")
            }
            for mode, factors in written_out.items()
        }
    }


def loss_factors() -> dict:
    """Bytes for a logit, an element of the head's input, an entry of the head, and one in every chunk."""
    sizes = [(8192, 512, 1024), (16384, 512, 1024), (8192, 1024, 1024), (8192, 512, 2048), (16384, 1024, 512)]
    factors: dict[str, dict] = {}
    for kind in ("fused", "chunked", "plain"):
        for mode in MODES:
            rows, moved = [], []
            for vocab_size, hidden, chunk in sizes:
                head = vocab_size * hidden / TOKENS
                rows.append([vocab_size, *([hidden, head, head * TOKENS / chunk] if kind == "fused" else [])])
                moved.append(count_loss(kind, mode, vocab_size, hidden, chunk) / TOKENS)
            factors.setdefault(kind, {})[mode] = solved(
                ("logit", "hidden", "head", "head a chunk"), rows, moved
            )
    return factors


def count_loss(kind: str, mode: str, vocab_size: int, hidden: int, chunk: int) -> float:
    """Bytes of the loss's kernels beside the head's products, forward and backward."""
    import torch
    from kernels import OTHER

    from pretraining.model import build_loss

    section = {**gpt2(hidden, hidden), "vocab_size": vocab_size, "n_layer": 1}
    with counted_model(section, "none") as (model, kernels):
        loss = build_loss(model, loss_settings(kind, chunk, mode == "compiled"))
        labels = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        states = torch.empty(BATCH, LENGTH, hidden, dtype=torch.bfloat16, requires_grad=True)

        def run() -> None:
            outputs = SimpleNamespace(logits=model.lm_head(states))
            loss(outputs, labels, num_items_in_batch=torch.ones(())).backward()
            model.zero_grad()
            states.grad = None

        return counted(run, kernels).sum(kind=OTHER).bytes


def loss_settings(kind: str, chunk_tokens: int, compiled: bool) -> dict:
    """A recipe's `loss` section."""
    off = {"z_loss": 0.0, "router_z_loss": 0.0}
    return {"kind": kind, "chunk_tokens": chunk_tokens, "compile": compiled, **off}


def engine_factors() -> dict:
    """Bytes a parameter of DeepSpeed's engines: each micro-batch, each step, each step over the ranks' number."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    few, many = 2, 8
    factors = {}
    for stage in (0, 1, 2, 3):
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:
            found = [fresh.submit(count_shipped_engine, stage, ranks).result() for ranks in (few, many)]
        share = (found[0]["step"] - found[1]["step"]) / (1 / few - 1 / many)
        factors[str(stage)] = {
            "micro-batch": round(found[1]["micro-batch"], 2),
            "step": round(found[1]["step"] - share / many, 2),
            "step of its share": round(share, 2),
        }
    return factors


def count_shipped_engine(stage: int, world_size: int) -> dict[str, float]:
    """`count_engine` of ds_configs/zero<stage>.json."""
    from pretraining.ds_config import load_ds_config

    return count_engine(load_ds_config(f"zero{stage}"), world_size)


if __name__ == "__main__":
    main()
