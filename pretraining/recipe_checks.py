"""What a recipe's sections ask of each other; each function raises `UserError` for the first key that does not fit."""

import json
import re

from pretraining.evaluation_keys import check_evaluation
from pretraining.model_types import own_key, value_of
from pretraining.mup import check_mup
from pretraining.schedules import DECAYING
from pretraining.schema import problem
from pretraining.step_sizes import check_multiple, check_ramp

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
    length = data["sequence_length"] or positions
    if length > positions:
        raise problem(where, "data.sequence_length", f"is {length}, but the model has {positions} positions")
    check_multiple(budget, "tokens_per_step", length, f"the sequence length {length}", where)
    steps = budget["tokens_per_step"]
    check_multiple(budget, "tokens", steps, f"budget.tokens_per_step {steps}", where)
    check_ramp(budget, length, where)
    _check_schedule_in_tokens(budget, training, where)
    if training.get("bf16") and training.get("fp16"):
        raise problem(where, "training.fp16", "and training.bf16 are both true; choose one")
    check_mup(values["mup"], model, where)
    _check_tokenizer(data["tokenizer"], model["vocab_size"], where)
    check_evaluation(values["evaluation"], values["checkpoints"]["keep_best"], training, where)
    if values["monitors"]["profile"] is not None:
        _check_profile(values["monitors"]["profile"].get("steps"), budget["tokens"] // steps, where)


def _check_schedule_in_tokens(budget: dict, training: dict, where: str) -> None:
    """What the budget says of the schedule in tokens, `training` may not say in steps."""
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
    if budget["warmup_tokens"] is not None and training.get("warmup_steps"):
        what = "and training.warmup_steps are both there; leave one out, or set training.warmup_steps=0"
        raise problem(where, "budget.warmup_tokens", what)
    kind = training.get("lr_scheduler_type", "linear")
    if budget["warmup_tokens"] is not None and kind == "constant":
        what = "is set, but training.lr_scheduler_type constant has no warm-up; write constant_with_warmup"
        raise problem(where, "budget.warmup_tokens", what)
    if budget["decay_tokens"] is None:
        return
    if kind != DECAYING:
        what = (
            f"is for training.lr_scheduler_type {DECAYING}, and that is {kind}; set that, or leave this out"
        )
        raise problem(where, "budget.decay_tokens", what)
    for key in ("num_decay_steps", "num_stable_steps"):
        if key in (training.get("lr_scheduler_kwargs") or {}):
            what = f"and training.lr_scheduler_kwargs.{key} are both there; leave one out"
            raise problem(where, "budget.decay_tokens", what)


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


def _check_tokenizer(tokenizer: str | dict, vocab_size: int, where: str) -> None:
    trained = tokenizer["train_vocab_size"] if isinstance(tokenizer, dict) else 0
    if trained > vocab_size:
        what = f"is {trained}, more than model.vocab_size {vocab_size}"
        raise problem(where, "data.tokenizer.train_vocab_size", what)
