"""Build an `AutoModelForCausalLM` from the recipe's `model` section; under ZeRO-3 it is sharded from the start."""

from dataclasses import replace

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.initialization import no_init_weights

from pretraining.errors import UserError
from pretraining.extend import load_extensions, model_extension
from pretraining.model.attention import choose_attention, describe_attention, missing_kernel, split_attention
from pretraining.model.compiling import (
    check_compiler,
    check_fp8_hardware,
    compile_model,
    convert_products,
    describe_compilation,
)
from pretraining.model.expert_parallel import split_experts
from pretraining.model.given_weights import GivenWeights
from pretraining.model.initial_weights import initialise_weights
from pretraining.model.recomputation import keep_products
from pretraining.model.vocabulary_parallel import split_vocabulary
from pretraining.recipe import Recipe, model_with_defaults
from pretraining.recipe.mup import Mup, scales_by_name
from pretraining.recipe.refusals import why_not_compiled
from pretraining.recipe.sections import Speed, Weights
from pretraining.runtime.process_group import ALONE, RankGroups, own_group
from pretraining.upstream.deepspeed import groups_at_once, no_zero3_draw
from pretraining.upstream.transformers import attention_of
from pretraining.upstream.wide_weights import keep_in_fp32

PLAIN = Speed(compile="none")
"""A `speed` section that asks for nothing."""
ALL_TRAINED = Weights()
"""Drawn weights, all of which are trained."""


def build_config(model: dict, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Build the transformers config of the recipe's `model` section, with the tokenizer's special tokens."""
    if own := model_extension(model["model_type"]):
        load_extensions([own])  # transformers knows the type from here on
    keywords = {k: v for k, v in model.items() if k != "model_type"}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    try:
        return AutoConfig.for_model(model["model_type"], **{"use_cache": False, **special, **keywords})
    except Exception as error:
        # Each class checks its keywords in its own way, and all of these come from the recipe.
        reason = " ".join(str(error).split())
        raise UserError(f"model: transformers refuses this {model['model_type']} config: {reason}") from error


def build_from_recipe(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TrainingArguments,
    draw_weights: bool,
    given: GivenWeights | None = None,
    groups: RankGroups = ALONE,
) -> PreTrainedModel:
    """Build the model (`build_model`) with all settings of the recipe."""
    masks_documents, speed, why_none = recipe.data.document_masking, recipe.speed, None
    on_gpu = torch.cuda.is_available()
    # Here and not in the recipe: what can be compiled depends on the ds_config and on this machine.
    if speed.compile == "auto":
        why_none = why_not_compiled(recipe, arguments.deepspeed, on_gpu=on_gpu)
        speed = replace(speed, compile="none") if why_none else speed
    # A processor compiles nothing unless it is asked to: that is no news.
    if arguments.process_index == 0 and (on_gpu or speed.compile != "none"):
        print(describe_compilation(speed, why_none), flush=True)
    sections = {"speed": speed, "mup": recipe.mup, "weights": recipe.weights}
    shared = {"given": given, "groups": groups}
    return build_model(
        recipe.model, tokenizer, arguments, draw_weights, masks_documents, **shared, **sections
    )


def build_model(
    model: dict,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TrainingArguments,
    draw_weights: bool = True,
    masks_documents: bool = False,
    speed: Speed = PLAIN,
    mup: Mup = Mup(),
    weights: Weights = ALL_TRAINED,
    given: GivenWeights | None = None,
    groups: RankGroups = ALONE,
) -> PreTrainedModel:
    """Build the model with its initial weights; the same weights at every ZeRO stage and world size.

    Args:
        arguments: name the ds_config; transformers finds ZeRO-3 through them while they are alive.
        draw_weights: False leaves the weights to a checkpoint.
        masks_documents: choose an attention that keeps documents apart.
        speed, mup, weights: the recipe's sections.
        given: take these weights in place of drawn ones.
        groups: which ranks work on the same samples, and how many split the experts.

    Raises:
        UserError: transformers refuses the `model` section, or this machine has no such kernel or no compiler.
    """
    check_compiler(speed)
    check_fp8_hardware(speed)
    attention = choose_attention(model, arguments, masks_documents)
    if groups.degrees.sequence > 1:
        attention = split_attention(attention, groups)
    config = build_config({**model, "attn_implementation": attention}, tokenizer)
    try:
        # drawn below, the same at every stage; ZeRO-3 makes the groups of nodes here (hpZ)
        with no_init_weights(), no_zero3_draw(), groups_at_once(own_group):
            built = AutoModelForCausalLM.from_config(
                config, dtype=_parameter_dtype(arguments), trust_remote_code=False
            )
    except KeyError as error:  # how transformers reports an unknown rope_type
        raise UserError(f"model.rope_parameters: transformers has no rope_type {error}") from error
    except (ImportError, ValueError) as error:
        if isinstance(error, ValueError) and "attn_implementation" not in str(error):
            raise UserError(f"model: {' '.join(str(error).split())}") from error
        # What remains is the attention: a package that is missing, or a name that transformers does not know.
        raise missing_kernel(attention, error) from error
    # On a processor there is one kernel, unless the recipe asks for more.
    chosen = torch.cuda.is_available() or masks_documents or "attn_implementation" in model
    if arguments.process_index == 0 and chosen:
        print(describe_attention(attention_of(built), masks_documents), flush=True)
    built.tie_weights()
    if weights.keep_in_fp32:
        keep_in_fp32(built, weights.keep_in_fp32, _parameter_dtype(arguments))
    if groups.degrees.expert > 1:
        with groups_at_once(own_group):
            split_experts(built, groups.degrees.expert)
    if given is not None:
        given.fill(built, arguments.device)
    elif draw_weights:
        names = [name for name, _ in built.named_parameters()]
        scales = scales_by_name(names, model_with_defaults(model), mup)
        factors = {name: each.initial for name, each in scales.items()}
        initialise_weights(built, arguments.seed, factors)
    if groups.degrees.tensor > 1:
        split_vocabulary(built, groups.degrees.tensor)
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(not weights.freezes(name))
    # The dataset's labels are already the next tokens: the Trainer must not count them as unshifted ones.
    built.loss_type = None
    if speed.fp8 != "none":
        # Before the model is compiled, so that the graphs contain the fp8 products.
        convert_products(built, speed.fp8)
    if speed.recompute == "operators":
        keep_products(built)
    compile_model(built, speed, groups.degrees)
    return built


def _parameter_dtype(arguments: TrainingArguments) -> torch.dtype:
    """Choose bf16 if DeepSpeed would cast to it anyway, else fp32."""
    # DeepSpeed makes its fp32 master weights from the bf16 ones at every stage: to build in bf16 changes no value and
    # halves host memory. Without DeepSpeed, autocast needs fp32 weights.
    return torch.bfloat16 if arguments.deepspeed and arguments.bf16 else torch.float32
