"""What a recipe's sections ask of each other; each function raises `UserError` for the first key that does not fit."""

import json
import re

from pretraining.errors import nearest
from pretraining.evaluation_keys import check_evaluation
from pretraining.mixture import check_mixture, source_name
from pretraining.model_types import own_key, value_of
from pretraining.mup import check_mup
from pretraining.schedules import check_schedule
from pretraining.schema import check, problem
from pretraining.step_sizes import StepSizes, check_multiple, check_ramp

ATTENTIONS = (
    "eager",
    "sdpa",
    "sdpa_causal",
    "torch_varlen",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
"""What `model.attn_implementation` names, beside a kernel of the hub (kernels-community/...)."""
CROSSES_DOCUMENTS = ("sdpa_causal",)
"""Those of them that cannot keep documents apart."""
ROPE = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor"), ("attention_factor", "factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "proportional": (("rope_theta",), ()),
}
"""{model.rope_parameters.rope_type: (keys it needs, keys it may have beside them)}, as transformers checks them."""
ROPE_ALWAYS = ("rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
ROTARY = ("llama", "mixtral", "qwen3", "qwen3_moe")
RECOMPUTATION = {
    "use_reentrant": {"type": "boolean"},
    "every_n_layers": {"type": "integer", "minimum": 1},
    "offload": {"type": "boolean"},
    "preserve_rng_state": {"type": "boolean"},
    "determinism_check": {"enum": ["default", "none"]},
    "early_stop": {"type": "boolean"},
    "debug": {"type": "boolean"},
}
NOT_REENTRANT = ("determinism_check", "early_stop", "debug")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What configuration classes call a layer's number of experts."""


def check_folder_name(name: str, key: str, where: str) -> None:
    """It names a folder below runs/ or data/: one that leads out of there would take over another."""
    if not re.fullmatch(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*", name) or name != name.strip():
        what = f"is {json.dumps(name, ensure_ascii=False)}; it must be the name of one folder: no slash, no dot first"
        raise problem(where, key, what)


def check_fit(values: dict, model: dict, positions: int, where: str) -> None:
    """What no single key can tell: values that must fit each other.

    model: the section with its class's defaults. positions: the longest sequence it is built for.
    """
    data, budget, training = (values[key] for key in ("data", "budget", "training"))
    _check_heads(model, where)
    _check_experts(model, where)
    _check_rope(model, where)
    _check_layer_types(model, where)
    _check_special_ids(values["model"], where)
    _check_attention(model, data["document_masking"], where)
    _check_loss(values["loss"], model, where)
    _check_recomputation(training, where)
    _check_kernels(training, model, where)
    _check_cadences(training, where)
    _check_optimizer_arguments(training.get("optim_args"), where)
    length = data["sequence_length"] or positions
    if length > positions:
        raise problem(where, "data.sequence_length", f"is {length}, but the model has {positions} positions")
    check_multiple(budget, "tokens_per_step", length, f"the sequence length {length}", where)
    steps = budget["tokens_per_step"]
    check_multiple(budget, "tokens", steps, f"budget.tokens_per_step {steps}", where)
    check_ramp(budget, length, where)
    _check_tokens_of_schedule(budget, where)
    sizes = StepSizes.of(budget)
    num_steps = sizes.steps_within(budget["tokens"])
    check_schedule(values, num_steps, where)
    check_mixture(data, sizes.tokens_at(num_steps) // length, length, where)
    if training.get("bf16") and training.get("fp16"):
        raise problem(where, "training.fp16", "and training.bf16 are both true; choose one")
    check_mup(values["mup"], model, where)
    _check_tokenizer(data["tokenizer"], model["vocab_size"], where)
    names = [source_name(source) for source in data["sources"]]
    check_evaluation(values["evaluation"], values["checkpoints"]["keep_best"], training, names, where)
    if values["monitors"]["profile"] is not None:
        _check_profile(values["monitors"]["profile"].get("steps"), num_steps, where)


def _check_tokens_of_schedule(budget: dict, where: str) -> None:
    """Warm-up and decay in tokens are whole steps that fit into the run."""
    unit = budget["tokens_per_step"]
    for key in ("warmup_tokens", "decay_tokens"):
        if budget[key] is not None:
            check_multiple(budget, key, unit, f"budget.tokens_per_step {unit}", where)
    spent = (budget["warmup_tokens"] or 0) + (budget["decay_tokens"] or 0)
    if spent > budget["tokens"]:
        key = "decay_tokens" if budget["decay_tokens"] else "warmup_tokens"
        what = f"is {budget[key]}; warm-up and decay together take {spent}, more than budget.tokens {budget['tokens']}"
        what += ": shorten them"
        raise problem(where, f"budget.{key}", what)


def _check_profile(steps: int | list[int] | None, num_steps: int, where: str) -> None:
    """One step, or the first and the last, of those that the run has."""
    key = "monitors.profile.steps"
    if steps is None:
        raise problem(where, key, "is missing; write one step, or the first and the last: [10, 12]")
    chosen = steps if isinstance(steps, list) else [steps]
    if len(chosen) > 2 or chosen[0] > chosen[-1]:
        raise problem(where, key, f"is {steps}; write the first and the last step: [10, 12]")
    if chosen[-1] > num_steps:
        raise problem(where, key, f"is {steps}, but the run has {num_steps} steps")


def _check_heads(model: dict, where: str) -> None:
    width_key, heads_key = own_key(model, "hidden_size"), own_key(model, "num_attention_heads")
    width, heads = model[width_key], model[heads_key]
    # Only some classes take a head_dim that the width does not follow from.
    must_divide = model["model_type"] in ("gpt2", "llama") or model.get("head_dim") is None
    if must_divide and width % heads:
        raise problem(
            where, f"model.{heads_key}", f"is {heads}, which does not divide model.{width_key} {width}"
        )
    key_value_heads = value_of(model, "num_key_value_heads") or heads
    if heads % key_value_heads:
        what = f"is {key_value_heads}, which does not divide model.{heads_key} {heads}"
        raise problem(where, f"model.{own_key(model, 'num_key_value_heads')}", what)


def _check_experts(model: dict, where: str) -> None:
    """A token's experts are among those there are, whose groups are of one size (as DeepSeek-V3 routes)."""
    key = next((key for key in EXPERTS if model.get(key)), None)
    if key is None:
        return
    experts, chosen, groups = model[key], model.get("num_experts_per_tok") or 1, model.get("n_group") or 1
    if chosen > experts:
        raise problem(where, "model.num_experts_per_tok", f"is {chosen}, more than model.{key} {experts}")
    if experts % groups:
        raise problem(where, "model.n_group", f"is {groups}, which does not divide model.{key} {experts}")
    if model["model_type"] == "qwen3_moe":
        _check_sparse_layers(model, where)


def _check_sparse_layers(model: dict, where: str) -> None:
    """One layer at least is a mixture of experts: every `decoder_sparse_step`th that is not in `mlp_only_layers`."""
    layers, step, dense = (
        model["num_hidden_layers"],
        model["decoder_sparse_step"],
        model["mlp_only_layers"] or [],
    )
    if not any((layer + 1) % step == 0 and layer not in dense for layer in range(layers)):
        key = "mlp_only_layers" if step <= layers else "decoder_sparse_step"
        what = f"is {model[key]}, which leaves none of {layers} layers with experts"
        raise problem(where, f"model.{key}", f"{what}; change it, or take model_type qwen3")


def _check_rope(model: dict, where: str) -> None:
    """Rotary positions of a known kind, with the keys that it needs, on heads of an even size."""
    if model["model_type"] not in ROTARY:
        return
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    if head_dim % 2:
        what = f"makes heads of {head_dim}, and rotary positions turn pairs: choose an even size of a head"
        raise problem(where, "model.head_dim" if model.get("head_dim") else "model.num_attention_heads", what)
    given, key = model.get("rope_parameters"), "model.rope_parameters"
    if not given:
        return
    for name, value in given.items():
        if value is None:
            raise problem(where, f"{key}.{name}", "is null; leave it out")
    kind = given.get("rope_type", "default")
    if kind not in ROPE:
        what = f"is {json.dumps(kind)}, not one of {', '.join(ROPE)}{nearest(kind, ROPE)}"
        raise problem(where, f"{key}.rope_type", what)
    needed, optional = ROPE[kind]
    for name in needed:
        if given.get(name) is None:
            raise problem(where, f"{key}.{name}", f"is missing; rope_type {kind} needs it")
    for name in given:
        if name not in (*needed, *optional, *ROPE_ALWAYS):
            raise problem(where, f"{key}.{name}", f"is no key of rope_type {kind}; leave it out")
    if kind == "longrope":
        for name in needed:
            if len(given[name]) != head_dim // 2:
                what = f"has {len(given[name])} numbers; half of a head needs {head_dim // 2}"
                raise problem(where, f"{key}.{name}", what)
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        what = f"is {given['high_freq_factor']:g}; it must be greater than low_freq_factor {given['low_freq_factor']:g}"
        raise problem(where, f"{key}.high_freq_factor", what)


def _check_layer_types(model: dict, where: str) -> None:
    """One kind of attention for every layer, a window where there is one to look back over."""
    given, key = model.get("layer_types"), "model.layer_types"
    if given is None:
        return
    layers = value_of(model, "num_hidden_layers")
    if len(given) != layers:
        layers_key = own_key(model, "num_hidden_layers")
        raise problem(
            where, key, f"has {len(given)} entries, and model.{layers_key} is {layers}: name every layer's"
        )
    if model["model_type"] != "qwen3":
        return
    for number, kind in enumerate(given):
        if kind not in ("full_attention", "sliding_attention"):
            what = f"is {json.dumps(kind)}; it must be full_attention or sliding_attention"
            raise problem(where, f"{key}.{number}", what)
    if "sliding_attention" in given and not (model.get("use_sliding_window") and model.get("sliding_window")):
        raise problem(
            where, key, "has sliding_attention, which needs model.use_sliding_window true and sliding_window"
        )


def _check_special_ids(model: dict, where: str) -> None:
    """Ids that the recipe names are rows of the embedding; those it leaves out are the tokenizer's."""
    for key in SPECIAL_IDS:
        given = model.get(key)
        for number in given if isinstance(given, list) else [given]:
            if number is not None and number >= model["vocab_size"]:
                what = f"is {number}, beyond model.vocab_size {model['vocab_size']}; leave it out: the tokenizer has it"
                raise problem(where, f"model.{key}", what)


def _check_attention(model: dict, masks_documents: bool, where: str) -> None:
    """A kernel that there is, and one that can do what the data section asks of it."""
    name, key = model.get("attn_implementation"), "model.attn_implementation"
    if name is None:
        return
    if name not in ATTENTIONS and "/" not in name:
        what = f"is {json.dumps(name)}, which is no attention{nearest(name, ATTENTIONS)}; known are "
        raise problem(where, key, f"{what}{', '.join(ATTENTIONS)}, or leave it out")
    if masks_documents and (name in CROSSES_DOCUMENTS or "/" in name):
        what = f"is {name}, which is not known to keep documents apart, as data.document_masking wants; leave it out"
        raise problem(where, key, what)
    if name == "flex_attention" and (model.get("attn_pdrop") or model.get("attention_dropout")):
        dropout = "attn_pdrop" if model.get("attn_pdrop") else "attention_dropout"
        raise problem(where, f"model.{dropout}", "is not 0, and flex_attention has no dropout: set it to 0")


def _check_loss(loss: dict, model: dict, where: str) -> None:
    """The routers' logits are there if their loss is wanted."""
    if loss["router_z_loss"] and not model.get("output_router_logits"):
        what = "needs a mixture of experts with model.output_router_logits true; set it, or leave router_z_loss out"
        raise problem(where, "loss.router_z_loss", what)


def _check_recomputation(training: dict, where: str) -> None:
    """Keywords of activation_checkpointing_enable() and of torch.utils.checkpoint.checkpoint()."""
    given, key = (
        training.get("activation_checkpointing_kwargs") or {},
        "training.activation_checkpointing_kwargs",
    )
    schema = {"type": "object", "properties": RECOMPUTATION, "additionalProperties": False}
    check(given, schema, where, key)
    if given.get("use_reentrant"):
        for name in given:
            if name in NOT_REENTRANT:
                raise problem(
                    where, f"{key}.{name}", "goes with use_reentrant false alone; leave one of them out"
                )


def _check_cadences(training: dict, where: str) -> None:
    """Steps between two logs, validations or saves: whole ones, or a share of the run below 1."""
    for key in ("logging_steps", "eval_steps", "save_steps"):
        every = training.get(key) or 1
        if every > 1 and every != int(every):
            what = f"is {every:g}; write a whole number of steps, or a share of the run below 1"
            raise problem(where, f"training.{key}", what)


def _check_optimizer_arguments(given: str | None, where: str) -> None:
    """`optim_args` is a list of names and values, as transformers takes it apart."""
    for pair in (given or "").replace(" ", "").split(",") if given else ():
        name, equals, value = pair.partition("=")
        if not (name and equals and value) or "=" in value:
            what = f"is {json.dumps(given)}; write name=value, several with commas between them"
            raise problem(where, "training.optim_args", what)


def _check_kernels(training: dict, model: dict, where: str) -> None:
    if training.get("use_liger_kernel") and model["model_type"] == "gpt2":
        what = "is true, and Liger has no kernels for gpt2: set it to false, or take model_type llama"
        raise problem(where, "training.use_liger_kernel", what)


def _check_tokenizer(tokenizer: str | dict, vocab_size: int, where: str) -> None:
    trained = tokenizer["train_vocab_size"] if isinstance(tokenizer, dict) else 0
    if trained > vocab_size:
        what = f"is {trained}, more than model.vocab_size {vocab_size}"
        raise problem(where, "data.tokenizer.train_vocab_size", what)
