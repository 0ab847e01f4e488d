"""Build TrainingArguments from the recipe's `training` section, the budget, the command line and the promises."""

import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, TrainingArguments, enable_full_determinism
from transformers.utils import is_liger_kernel_available, is_torch_tf32_available

from pretraining.command_line import ranks_here
from pretraining.ds_config import degrees_of, zero_stage
from pretraining.errors import UserError, require
from pretraining.extend import defined
from pretraining.outside.schema import problem
from pretraining.planning.memory.states import block_gathering, reduce_bucket
from pretraining.planning.setup import Setup
from pretraining.planning.shapes import layer_numel, widths_of
from pretraining.recipe import Recipe
from pretraining.recipe.refusals import gathers_blocks, why_not_compiled
from pretraining.recipe.training import PIECEWISE
from pretraining.runtime.process_group import gather_from_ranks
from pretraining.training.operators import check_operators

# The promises need these values: a recipe may not set them.
FIXED = {
    "train_sampling_strategy": "sequential",  # the dataset is already in the run's global order
    "dataloader_drop_last": True,
    "ignore_data_skip": True,  # a resumed dataset starts at the consumed position
    "average_tokens_across_devices": False,  # `count_targets` of the Trainer does it, where ranks can differ
    "ddp_find_unused_parameters": False,
    "prediction_loss_only": True,
    "remove_unused_columns": False,
    "logging_nan_inf_filter": False,  # a NaN is shown as a NaN
    "save_total_limit": None,  # older checkpoints go only after a newer one is committed
    "disable_tqdm": True,  # ProgressCallback shows tokens/s and time left
    "report_to": "none",  # trackers are attached behind the callback that completes the metrics
}

WORKER_KEYS = (
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context",
)
PREFETCHED_BYTES = 64 << 20
"""Bytes of batches that a rank's workers keep ready: more than any shipped recipe needs for a step."""
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_SHARE = 0.25
"""Share of the free shared memory that workers may fill with batches. NCCL needs some too. Docker gives 64 MB."""


def build_arguments(
    recipe: Recipe,
    ds_config: dict | None,
    output_dir: Path,
    accumulation_steps: int,
    last_step: int | None = None,
) -> TrainingArguments:
    """Build the arguments. Raises `UserError` with the reason if this machine or transformers refuses a value.

    last_step: the step after which the run ends, if it is not the recipe's own number of steps.
    """
    on_gpu = torch.cuda.is_available()
    owned = {
        # every rank reads its own batches: rank 0 must not read and send them
        "accelerator_config": {"dispatch_batches": False, "split_batches": False, "non_blocking": on_gpu},
        "output_dir": str(output_dir),
        "deepspeed": engine_config(recipe, ds_config),
        "max_steps": recipe.num_steps if last_step is None else last_step,
        "gradient_accumulation_steps": accumulation_steps,
        "use_cpu": not on_gpu,
    }
    keywords = {k: v for k, v in recipe.training_keywords.items() if k not in FIXED}
    if not keywords.get("dataloader_num_workers"):  # torch refuses settings of workers if there are none
        keywords = {k: v for k, v in keywords.items() if k not in WORKER_KEYS}
    elif keywords.get("dataloader_prefetch_factor") is None:
        # The least of all ranks: those that wait for data together must read equally far ahead.
        keywords["dataloader_prefetch_factor"] = min(
            gather_from_ranks(prefetch_factor(recipe, accumulation_steps))
        )
    if keywords.get("bf16") and ds_config and zero_stage(ds_config) == 0:
        keywords["bf16"] = False  # autocast, see engine_config
    if keywords.get("tf32") and not is_torch_tf32_available():
        what = "needs an Ampere GPU or a later one, and there is none here; leave it out"
        raise problem(recipe.where, "training.tf32", what)
    if recipe.training.bf16 and is_torch_tf32_available():
        keywords = {"tf32": True, **keywords}  # not in a fp32 recipe: it asks for fp32
    if keywords.get("tf32"):
        # transformers sets only torch's new switch. Inductor's autotuning reads the old one, which then raises.
        torch.set_float32_matmul_precision("high")
    if keywords.get("lr_scheduler_type") in (PIECEWISE, *defined(recipe.extensions, "schedule")):
        # PretrainingTrainer makes it: transformers takes names of its own only
        keywords |= {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}}
    keywords.setdefault("use_liger_kernel", fuses_with_liger(recipe, ds_config, on_gpu))
    if keywords["use_liger_kernel"]:
        require("liger_kernel", "training.use_liger_kernel")
        # Use Liger's norms, rotary embeddings and gated layers only. The recipe has its own loss and forward pass.
        given = keywords.get("liger_kernel_config") or {}
        # Liger's experts read from the GPU how many tokens each gets: the host waits in every layer (liger-kernel
        # 0.8.5, ops/fused_moe.py). They would also take the place of split experts, which know their exchange.
        plain = {"swiglu": False}
        keywords["liger_kernel_config"] = {
            **(plain if widths_of(recipe.model).experts else {}),
            **given,
            **(plain if degrees_of(ds_config).expert > 1 else {}),
            "cross_entropy": False,
            "fused_linear_cross_entropy": False,
        }
    if keywords.get("activation_checkpointing"):
        # With keywords that do not name it, torch takes True: routers' scores then have no gradient.
        given = keywords.get("activation_checkpointing_kwargs") or {}
        keywords["activation_checkpointing_kwargs"] = {"use_reentrant": False, **given}
    if keywords.get("full_determinism"):
        # The Trainer does this too, but after the model is built. cuBLAS reads its setting at the first product.
        enable_full_determinism(keywords.get("seed", TrainingArguments.seed))
    # without a GPU only DeepSpeed trains in fp16, on some processors
    if keywords.get("fp16") and not on_gpu and not (ds_config and get_accelerator().is_fp16_supported()):
        what = "needs a GPU, or DeepSpeed and a processor that computes in it; set training.bf16, or neither"
        raise problem(recipe.where, "training.fp16", what)
    check_operators(ds_config)
    with training_refusals(recipe.where):
        return TrainingArguments(**keywords, **FIXED, **owned)


def fuses_with_liger(recipe: Recipe, ds_config: dict | None, on_gpu: bool) -> bool:
    """Return whether Liger's kernels are used by default: if `speed.compile: auto` compiles no blocks on this GPU."""
    if not on_gpu or recipe.speed.compile != "auto":
        return False
    # Liger fuses norms, rotary embeddings and gated layers. It has nothing for GPT-2, nor for modules kept in fp32.
    if recipe.model.model_type == "gpt2" or recipe.weights.names_modules:
        return False
    return why_not_compiled(recipe, ds_config, on_gpu) is not None and is_liger_kernel_available()


def prefetch_factor(recipe: Recipe, accumulation_steps: int) -> int:
    """Return how many batches each worker keeps ready. Together the workers hold a whole step, if memory allows it.

    The Trainer takes all micro-batches of a step before the first forward pass (transformers 5.24,
    `Trainer.get_batch_samples`). The GPU waits for those that are not ready then.
    """
    workers = recipe.training.dataloader_num_workers
    # the larger of training's and validation's batches, which must both fit
    samples = max(recipe.micro_batch, recipe.training.per_device_eval_batch_size)
    arrays = 3 if recipe.data.document_masking else 2  # inputs, labels, positions, 8 bytes a token each
    batch_bytes = 8 * arrays * samples * recipe.sequence_length
    room = PREFETCHED_BYTES
    if SHARED_MEMORY.is_dir():
        room = min(room, SHARED_MEMORY_SHARE * shutil.disk_usage(SHARED_MEMORY).free / ranks_here())
    # 2 is torch's own default
    return max(2, min(math.ceil(accumulation_steps / workers), int(room / (workers * batch_bytes))))


SLICES: dict[str, dict] = {
    "colwise": {"partition_type": "column"},
    "rowwise": {"partition_type": "row"},
    # these norms see only the heads of their rank: each rank has a part of their gradient
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
}
"""{what transformers calls a way to split a layer: AutoTP's rule}"""


def engine_config(recipe: Recipe, ds_config: dict | None) -> dict | None:
    """Return DeepSpeed's configuration: the ds_config, with what the recipe's precision and compiled blocks need."""
    if not ds_config:
        return None
    setup = Setup(recipe, ds_config)
    # DeepSpeed's throughput timer waits for the device in every micro-batch. The metrics have their own clock, and no
    # order depends on that wait: test_stream_order.py trains without it.
    config = deepcopy(ds_config) | {"timers": {"throughput": {"enabled": False}}}
    # Sequences are split here. With its key, DeepSpeed 0.19.8 would count fewer ranks than it averages over.
    config.pop("sequence_parallel_size", None)
    # Experts too (model/parallel.py): DeepSpeed would replace the routers by its own.
    config.pop("expert_parallel", None)
    # the export gathers them, with tensor parallelism at every stage; DeepSpeed's own default is false
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if degrees_of(ds_config).tensor > 1:
        config["tensor_parallel"]["partition_config"] = split_layers(recipe.model)
    if gathers_blocks(recipe, ds_config, torch.cuda.is_available()):
        # of layers and experts that are split, a rank gathers its own parts
        config["zero_optimization"] |= block_gathering(config["zero_optimization"], layer_numel(setup.held))
    if zero_stage(ds_config) > 0 and config["zero_optimization"].get("reduce_bucket_size") != "auto":
        # DeepSpeed allocates the whole bucket in every backward pass
        config["zero_optimization"]["reduce_bucket_size"] = reduce_bucket(setup)
    if recipe.speed.compile == "deepcompile":
        config["compile"] = {"deepcompile": True}
    if recipe.training.bf16 and zero_stage(ds_config) == 1:
        # DeepSpeed 0.19.8 clears all gradients when a backward pass reaches the model's output (BF16_Optimizer,
        # `backward_prologue`). The loss computes the head's gradient before that, so it must be added up at once.
        config["bf16"] = {**ds_config.get("bf16", {}), "immediate_grad_update": True}
    if recipe.training.bf16 and zero_stage(ds_config) == 0:
        # DeepSpeed 0.19.8 has no bf16 engine with fp32 accumulation at stage 0. Use autocast over fp32 weights.
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return config


def split_layers(model: dict) -> dict:
    """Return AutoTP's rules, from transformers' plan for the type: columns, rows, and norms of heads, which stay whole.

    Experts stay whole; embedding and head are `model/parallel.py`'s. Raises `UserError` for a plan of other slices.
    """
    specs = []
    for place, style in (AutoConfig.for_model(**deepcopy(model)).base_model_tp_plan or {}).items():
        if place.split(".")[0] != "layers" or ".experts" in place:
            continue
        if style not in SLICES:
            what = f"{model['model_type']} has no tensor degree"
            raise UserError(f"model.model_type: {what}: its {place.removeprefix('layers.*.')} is {style}")
        # a bias of rows stays whole, and AutoTP adds it once
        end = r"\.weight$" if style == "rowwise" else r"\.(weight|bias)$"
        pattern = r"(.*\.)?" + re.escape(place).replace(r"\*", r"\d+") + end
        specs.append({"patterns": [pattern], **SLICES[style]})
    return {"use_default_specs": False, "layer_specs": specs}


@contextmanager
def training_refusals(where: str) -> Iterator[None]:
    """Turn an error of transformers about a value of the recipe's `training` into one line that names the file."""
    try:
        yield
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(f"recipe {where}: training: {error}") from error
