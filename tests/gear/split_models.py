"""What degrees and ZeRO-3 change in a small model of any type: trained on two ranks, against one process at ZeRO-0."""

from pretraining.recipe.model import has_experts
from tests.gear.on_ranks import on_ranks
from tests.gear.runs import TOKENIZER

LAYOUTS = {
    "zero3": "zero3",
    "sequence": "zero0:sequence=2",
    "expert": "zero0:expert=2",
    "tensor": "zero0:tensor=2",  # last: DeepSpeed keeps its mesh of split layers
}
"""{ability: the layout that shows it}"""
STEPS, ROWS, LENGTH, RATE = 3, 4, 24, 0.1
LOSS_TOLERANCE, MOVED_TOLERANCE = 1e-5, 1e-2
"""Of a loss; of what the steps have changed in a weight, in parts of the largest change."""


def measured_on_two(model: dict) -> dict[str, str | None]:
    """Return {ability: None, or why the model lacks it} of a model section, which should be small.

    A rank that fails ends the other, which waits for it; each ability is then measured by itself.
    """
    abilities = [ability for ability in LAYOUTS if ability != "expert" or has_experts(model)]
    try:
        return on_ranks(2, abilities_here, model, abilities)[0]
    except AssertionError:
        return {ability: _alone(model, ability) for ability in abilities}


def _alone(model: dict, ability: str) -> str | None:
    try:
        return on_ranks(2, abilities_here, model, [ability])[0][ability]
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return (lines or ["a rank failed"])[-1][:160]


def abilities_here(model: dict, abilities: list[str]) -> dict[str, str | None]:
    """Measure on this rank; both ranks return the same. A collective."""
    import warnings

    from transformers.utils import logging

    from pretraining.errors import UserError
    from pretraining.runtime.process_group import gather_from_ranks

    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    found = {}
    for ability in abilities:
        try:
            reason = measure(model, ability)
        except UserError as error:
            reason = str(error).rpartition("degree: ")[2]
        except Exception as error:  # each class has its own for what it cannot do
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        found[ability] = next((each for each in gather_from_ranks(reason) if each), None)
    return found


def measure(model: dict, ability: str) -> str | None:
    """Return the first thing that differs from a whole model; None if nothing does. A collective."""
    import torch

    from pretraining.ds_config import degrees_of, load_ds_config
    from pretraining.upstream.deepspeed import own_rows, split_part, whole_shape
    from pretraining.upstream.transformers import is_experts

    model = {"initializer_range": 0.18, **model} if "initializer_range" in known_keys(model) else dict(model)
    if "attention_chunk_size" in known_keys(model):
        model["attention_chunk_size"] = 6
    ds_config = load_ds_config(LAYOUTS[ability])
    degrees = degrees_of(ds_config)
    if ability == "sequence" and model.get("sliding_window"):
        model |= without_windows(model)
    losses, network, before = trained({**model, "attn_implementation": "eager"}, None, degrees)
    if ability == "expert" and not any(is_experts(module) for module in network.modules()):
        return "it has no experts in one module"
    ours, split, _ = trained(model, ds_config, degrees)
    for step, (here, there) in enumerate(zip(ours, losses, strict=True), 1):
        if not abs(here - there) <= LOSS_TOLERANCE * max(1.0, abs(there)):
            return f"the loss of step {step} differs by {abs(here - there):.0e}"
    theirs = dict(network.named_parameters())
    is_split = ability in ("zero3", "sequence")
    for name, parameter in split.named_parameters():
        if whole_shape(parameter) != tuple(theirs[name].shape):
            return f"{name} has another shape"
        here, there, start = gathered(parameter), theirs[name].data, before[name]
        if parts := split_part(parameter):
            is_split = True
            for dimension, (first, number) in parts.items():
                there, start = (each.narrow(dimension, first, number) for each in (there, start))
        there, start = own_rows(parameter, there), own_rows(parameter, start)
        is_split = is_split or there.shape != theirs[name].shape
        most = (theirs[name].data - before[name]).abs().max().item()
        difference = (here - there).abs().max().item() if here.numel() else 0.0
        if not difference <= MOVED_TOLERANCE * most + 1e-6:
            return f"the change of {name} differs by {difference / max(most, 1e-12):.0%}"
    buffers = dict(network.named_buffers())
    for name, buffer in split.named_buffers():
        there = buffers.get(name)
        if there is not None and there.shape == buffer.shape and not torch.allclose(buffer, there, atol=1e-5):
            return f"the buffer {name} differs"
    tables = {id(split.get_input_embeddings().weight), id(split.get_output_embeddings().weight)}
    layers = [each for each in split.parameters() if id(each) not in tables]
    if ability == "tensor" and not any(split_part(each) for each in layers):
        return "transformers has no plan by which a layer is split"
    return None if is_split else "nothing is split"


def without_windows(model: dict) -> dict:
    """What a recipe with split sequences must set."""
    from transformers import AutoConfig

    if "layer_types" in known_keys(model):
        layers = AutoConfig.for_model(**model).num_hidden_layers
        return {"layer_types": ["full_attention"] * layers}
    return {"sliding_window": None}


def known_keys(model: dict) -> dict:
    from transformers import AutoConfig

    return AutoConfig.for_model(model["model_type"]).to_dict()


def gathered(parameter):
    """What this rank has of a parameter, shards of ZeRO-3 put together."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _engine_settings(model: dict, ds_config: dict, degrees, accumulation: int) -> dict:
    from pretraining.training.arguments import split_layers

    zero = {key: value for key, value in ds_config["zero_optimization"].items() if value != "auto"}
    if zero["stage"] == 3:
        zero |= {"stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
    }
    if degrees.tensor > 1:
        split = {"partition_config": split_layers(model)}
        config["tensor_parallel"] = ds_config["tensor_parallel"] | split
    return config


def trained(model: dict, ds_config: dict | None, degrees) -> tuple[list, object, dict]:
    """Train some steps of two micro-batches by SGD; return (mean loss of each step, model, weights before).

    ds_config: None: one process has both micro-batches. If the layout splits samples, each rank has one of them.
    """
    from types import SimpleNamespace

    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    from pretraining.model.build import build_model
    from pretraining.model.loss import build_loss
    from pretraining.recipe.sections import Loss
    from pretraining.runtime.process_group import ALONE, rank_groups
    from pretraining.training.experts import ExpertLoad
    from pretraining.training.trainer import collate_blocks
    from pretraining.upstream.split_weights import expert_groups_of

    groups = rank_groups(degrees) if ds_config else ALONE
    shares_samples = degrees.ranks_per_sample > 1
    accumulation = 2 if shares_samples else 1
    config = _engine_settings(model, ds_config, degrees, accumulation) if ds_config else None
    alive = HfDeepSpeedConfig(config) if config else None
    arguments = SimpleNamespace(bf16=False, fp16=False, deepspeed=config, process_index=1, seed=0)
    try:
        network = build_model(model, TOKENIZER, arguments, groups=groups).train()
        before = {name: each.detach().clone() for name, each in network.named_parameters()}
        loss = build_loss(network, Loss(kind="plain", balance_weight=0.1, sequence_balance=0.1), groups)
        load = ExpertLoad(None, bias_rate=0.01, logs=False)
        load.routing = getattr(network, "routing", None)
        loss = load.around(loss)
        optimizer = torch.optim.SGD(expert_groups_of([{"params": list(network.parameters())}]), lr=RATE)
        engine = None
        if config:
            engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config)
        micro_batches = 2 if shares_samples or not config else 1
        generator, losses = torch.Generator().manual_seed(1), []
        for _ in range(STEPS):
            tokens = torch.randint(1, model["vocab_size"], (ROWS, LENGTH + 1), generator=generator)
            halves = tokens.chunk(2)
            if micro_batches == 1:
                halves = [halves[dist.get_rank()]]
            total = 0.0
            for half in halves:
                blocks = [{"input_ids": row[:-1], "labels": row[1:]} for row in half.numpy()]
                batch = collate_blocks(blocks, groups.sequence_part, groups.degrees.sequence)
                labels = batch.pop("labels")
                value = loss((engine or network)(**batch), labels)
                if engine:
                    engine.backward(value)
                    engine.step()
                else:
                    (value / micro_batches).backward()
                total += value.item() / micro_batches
            if not engine:
                optimizer.step()
                optimizer.zero_grad()
            load.on_step_end(None, None, None)  # one process of two counts all twice: the signs are the same
            if config:
                number = torch.tensor(total, dtype=torch.float64)
                dist.all_reduce(number)
                total = float(number) / dist.get_world_size()
            losses.append(total)
        return losses, network, before
    finally:
        unset_hf_deepspeed_config()
        del alive
