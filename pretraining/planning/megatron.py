"""Arguments of Megatron-LM for a layout with pipeline stages, which cannot be trained here.

Neither the Trainer nor DeepSpeed cuts a model of Transformers into pipeline stages. Who needs them can take the
prepared data along (`python -m pretraining.data convert --to megatron`), and train the same shape, batch and schedule
there. The names are those of Megatron-LM's pretrain_gpt.py (megatron/training/arguments.py). Initial weights and the
order of samples are Megatron's own, so that the curve is another one.
"""

from pretraining.errors import UserError
from pretraining.planning.layout import ParallelLayout
from pretraining.planning.shapes import widths_of
from pretraining.recipe import Recipe, model_with_defaults
from pretraining.recipe.model import is_exact, value_of

STYLES = {"cosine": "cosine", "cosine_with_min_lr": "cosine", "linear": "linear", "constant": "constant"}
STYLES |= {
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse-square-root",
    "warmup_stable_decay": "WSD",
}
"""`training.lr_scheduler_type` -> Megatron's `--lr-decay-style`."""
DECAYS = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}
"""`decay_type` of a warmup_stable_decay -> Megatron's `--lr-wsd-decay-style`."""
PLACE = "DATA"
"""Folder that the data is converted to, and that the arguments name."""


def megatron_arguments(recipe: Recipe, layout: ParallelLayout, gpus_per_node: int) -> list[str]:
    """Return the launcher and the arguments of pretrain_gpt.py for a recipe at a layout, one of them in each entry.

    Raises:
        UserError: the recipe asks for what Megatron-LM has no argument for.
    """
    _refuse(recipe)
    training, length = recipe.training, recipe.sequence_length
    num_gpus = layout.data * layout.tensor * layout.pipeline * layout.context
    here = min(num_gpus, gpus_per_node)
    words = [
        f"torchrun --nnodes={num_gpus // here} --nproc_per_node={here} pretrain_gpt.py",
        *_shape(recipe),
        f"--tensor-model-parallel-size {layout.tensor}",
        f"--pipeline-model-parallel-size {layout.pipeline}",
        f"--context-parallel-size {layout.context}",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
    ]
    # the plan counts the residual stream as split over the tensor ranks
    words += ["--sequence-parallel"] if layout.tensor > 1 else []
    if layout.recompute:
        words += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    words += [
        f"--seq-length {length}",
        f"--max-position-embeddings {max(length, value_of(recipe.model, 'max_position_embeddings'))}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {recipe.samples_per_step}",
        f"--train-samples {recipe.num_samples}",
        f"--seed {training.seed}",
        *[f"--{name}" for name in ("bf16", "fp16") if training.get(name)],
        f"--lr {training.learning_rate:g}",
        f"--weight-decay {training.weight_decay:g}",
        f"--adam-beta1 {training.adam_beta1:g}",
        f"--adam-beta2 {training.adam_beta2:g}",
        f"--adam-eps {training.adam_epsilon:g}",
        f"--clip-grad {training.max_grad_norm:g}",
        *_schedule(recipe),
        f"--train-data-path {PLACE}/train",
        f"--valid-data-path {PLACE}/validation",
        "--tokenizer-type HuggingFaceTokenizer",
        f"--tokenizer-model {PLACE}/tokenizer",
        f"--vocab-size {recipe.model.vocab_size}",
    ]
    masked = ["--reset-position-ids", "--reset-attention-mask"] if recipe.data.document_masking else []
    return words + masked


def _refuse(recipe: Recipe) -> None:
    """Raise for what would silently train something else."""
    model, training = recipe.model, recipe.training
    reasons = {
        f"model.model_type {model.model_type}": not is_exact(model),
        f"optimizer.name {recipe.optimizer.name}": recipe.optimizer.name != "adamw",
        f"training.optim {training.optim}": not training.optim.startswith("adamw_torch"),
        f"training.lr_scheduler_type {training.lr_scheduler_type}": training.lr_scheduler_type not in STYLES,
        "mup": recipe.mup.base_width is not None,
        "model.mlp_only_layers": bool(model.get("mlp_only_layers")),
        "model.decoder_sparse_step": model.get("decoder_sparse_step", 1) != 1,
        "budget.ramp": recipe.budget.ramp is not None,
        "loss.function": recipe.loss.function is not None,
        "model.frozen": bool(recipe.weights.frozen),
        "model.initial_weights": recipe.weights.initial_weights is not None,
    }
    if found := [name for name, is_so in reasons.items() if is_so]:
        raise UserError(f"--megatron: {found[0]}: Megatron-LM has no arguments for it; leave it out")


def _shape(recipe: Recipe) -> list[str]:
    shape = model_with_defaults(recipe.model)
    widths = widths_of(shape)
    words = [
        f"--num-layers {widths.layers}",
        f"--hidden-size {widths.hidden}",
        f"--ffn-hidden-size {widths.inner}",
        f"--num-attention-heads {widths.heads}",
        f"--kv-channels {widths.head_size}",
        f"--init-method-std {shape['initializer_range']:g}",
    ]
    if widths.key_value_heads != widths.heads:
        words += ["--group-query-attention", f"--num-query-groups {widths.key_value_heads}"]
    if not shape["tie_word_embeddings"]:
        words.append("--untie-embeddings-and-output-weights")
    if shape["model_type"] == "gpt2":
        return [
            *words,
            "--position-embedding-type learned_absolute",
            f"--norm-epsilon {shape['layer_norm_epsilon']:g}",
            f"--attention-dropout {shape['attn_pdrop']:g}",
            f"--hidden-dropout {shape['resid_pdrop']:g}",
        ]
    rope = shape.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        what = "Megatron-LM's own scaling differs by version; set it by hand beside these arguments"
        raise UserError(f"--megatron: model.rope_parameters.rope_type {rope['rope_type']}: {what}")
    base = rope.get("rope_theta") or shape.get("rope_theta") or 10000
    words += ["--normalization RMSNorm", f"--norm-epsilon {shape['rms_norm_eps']:g}", "--swiglu"]
    words += ["--position-embedding-type rope", f"--rotary-base {base:.0f}"]
    words += [] if shape.get("attention_bias") or shape.get("mlp_bias") else ["--disable-bias-linear"]
    words += [f"--attention-dropout {shape['attention_dropout']:g}", "--hidden-dropout 0"]
    words += ["--qk-layernorm"] if shape["model_type"].startswith("qwen3") else []
    if not widths.experts:
        return words
    words += [
        f"--num-experts {widths.experts}",
        f"--moe-router-topk {widths.chosen_experts}",
        f"--moe-ffn-hidden-size {widths.expert_inner}",
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type alltoall",
    ]
    if shape.get("output_router_logits"):
        coefficient = f"--moe-aux-loss-coeff {shape['router_aux_loss_coef']:g}"
        words += ["--moe-router-load-balancing-type aux_loss", coefficient]
    else:
        words.append("--moe-router-load-balancing-type none")
    z_loss = recipe.loss.router_z_loss
    return words + ([f"--moe-z-loss-coeff {z_loss:g}"] if z_loss else [])


def _schedule(recipe: Recipe) -> list[str]:
    """Return the schedule in samples, which Megatron counts as `--train-samples` does."""
    training, unit = recipe.training, recipe.samples_per_step
    keywords, kind = training.lr_scheduler_kwargs or {}, training.lr_scheduler_type
    lowest = keywords.get("min_lr") or training.learning_rate * (
        keywords.get("min_lr_rate") or keywords.get("min_lr_ratio") or 0.0
    )
    words = [
        f"--lr-decay-style {STYLES[kind]}",
        f"--min-lr {lowest:g}",
        f"--lr-warmup-samples {recipe.warmup_steps(recipe.num_steps) * unit}",
        f"--lr-decay-samples {recipe.num_samples}",
    ]
    if kind == "warmup_stable_decay":
        tokens = recipe.budget.decay_tokens
        samples = tokens // recipe.sequence_length if tokens else keywords["num_decay_steps"] * unit
        words += [f"--lr-wsd-decay-style {DECAYS[keywords.get('decay_type', 'linear')]}"]
        words += [f"--lr-wsd-decay-samples {samples}"]
    return words
