"""You know before you pay: what a recipe, its ds_config or its ranks rule out is one line, from every command alike."""

import inspect
import json
import os
import re
import shlex
import sys
from collections import Counter

import pytest

from pretraining.errors import UserError
from pretraining.recipe import load_recipe
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.recipe.training import KEYWORDS
from pretraining.training.arguments import build_arguments
from pretraining.training.optimizers import check_optimizer
from tests.gear.finished_data import refusal
from tests.gear.recipe_fuzz import RecipeFuzz, checked_recipes, is_looser, plan_outcome, training_outcome
from tests.gear.runs import EXPERTS, LLAMA, execute

GIVEN = r"""
model.n_emb=64
    model.n_emb: unknown key; did you mean 'model.n_embd'?
training.learnin_rate=1
    did you mean 'training.learning_rate'?
data.tokenizer.train_vocab=9
    did you mean 'data.tokenizer.train_vocab_size'?
learning_rate=0.1
    learning_rate: unknown key; did you mean 'training.learning_rate'?
data.learning_rate=0.1
    did you mean 'training.learning_rate'?
data.weight=1
    did you mean 'data.sources.0.weight'?
data.sources[0].weight=1
    did you mean 'data.sources.0'?
max_steps=3
    max_steps: does not belong here: derived from budget.tokens
buget.tokens=5
    buget: unknown key; did you mean 'budget'?
training.warmup_ratio=0.1
    training.warmup_ratio: does not belong here: its name is warmup_steps now, and below 1 it is a share
model.hidden_act=silu
    model.hidden_act: unknown key
model.model_type=gpt3
    did you mean 'gptj', 'gpt2' or 'gpt-sw3'?
'model.n_embd="512"'
    model.n_embd: is the string "512" where an integer
'training.learning_rate="6e-4"'
    write 6e-4 without quotes
training.bf16=1
    training.bf16: is 1 where true or false is wanted
training.lr_scheduler_type=cosin
    did you mean 'cosine'?
model.n_layer=1000000000
    model.n_layer: is 1000000000; it must be at most 2000
budget.tokens=1e200
    it must be at most 1000000000000000000
budget.tokens=-8192
    it must be at least 1
data.validation_share=1.5
    it must be less than 1
data.sources.0.path=x.txt
    needs exactly one of builtin, path, dataset
'data.sources=[{"path": "x.jsonl", "split": "test"}]'
    data.sources.0.split: goes with dataset, whose text it chooses
'data.sources=[{"path": "x.txt", "format": "lines", "text_column": "body"}]'
    data.sources.0.text_column: asks for fields, and lines have none
'data.sources=[{"path": "x.jsonl", "keep": [{"field": "score", "at_least": 4, "at_most": 3}]}]'
    at_least: is 4, more than data.sources.0.keep.0.at_most 3: no row would be read
data.sources.3.path=x
    data.sources is a list of 1
budget.tokens.x=1
    budget.tokens is not an object
model.n_embd
    write --set section.key=value
evaluation.sampling.seed=9223372036854775808
    it must be at most 9223372036854775807
checkpoints.keep_last=0
    it must be at least 1
monitors.hang_minutes=1e-8
    monitors.hang_minutes: is 1e-08; it must be at least 0.25
monitors.hang_minutes=1e300
    it must be at most 43200
report.every_seconds=1e-9
    it must be at least 0.1
monitors.spikes.score=1e-3
    it must be at least 1
monitors.spikes.window=1000000000000
    it must be at most 65536
monitors.spikes.lr_factor=1e3
    it must be at most 1
model.n_head=5
    model.n_head: is 5, which does not divide model.n_embd 128
data.sequence_length=512
    is 512, but the model has 128 positions
budget.tokens=1.5B
    budget.tokens: is the string "1.5B" where an integer is wanted; write 1.5e9
budget.tokens=1000
    1000 is not a multiple of budget.tokens_per_step 2048; the nearest is
budget.tokens_per_step=1000
    the nearest are 896 and 1024
'data.tokenizer={"train_vocab_size": 300, "special_tokens": ["<a>", "<a>"]}'
    data.tokenizer.special_tokens.1: is '<a>', which is there already
'data.tokenizer={"train_vocab_size": 257, "special_tokens": ["<a>"]}'
    256 bytes and 2 special tokens need 258
data.tokenizer.train_vocab_size=4096
    more than model.vocab_size
training.seed=-1
    training.seed: is -1; it must be at least 0
training.data_seed=99999999999
    it must be at most 4294967295
training.save_strategy=best
    not one of "no", "steps", "epoch"
training.learning_rate=1e400
    1e400 is too large for a number
training.report_to=wandbb
    did you mean 'wandb'
training.report_to=tensorboard,trackio
    ; write it as a list: ["tensorboard", "trackio"]
'evaluation.tasks=arc_easy, piqa'
    ; write it as a list: ["arc_easy", "piqa"]
'training.report_to=["tensorboard", "wandbb"]'
    training.report_to.1: is the string
data.name=
    data.name: is ""
data.name=../other
    data.name: is "../other"; it must be the name of one folder
data.name=.hidden
    data.name
'data.name=a\b'
    data.name
name=a/b
    name: is "a/b"; it must be the name of one folder
name=..
    name: is ".."
evaluation.metric=los
    did you mean 'loss'
evaluation.metric=python_stdlib_loss
    with a single source that is 'loss'
evaluation.metric=train/loss
    no validation of this recipe measures; there are loss, perplexity
evaluation.metric=arc/acc
    evaluation.metric: is 'arc/acc', but nothing scores it
evaluation.patience=2 training.eval_strategy=no
    evaluation.patience: is 2, but nothing is validated
evaluation.patience=2 training.eval_strategy=epoch
    evaluation.patience: is 2, but nothing is validated while training
evaluation.task_steps=300
    evaluation.task_steps: is 300, no multiple of training.eval_steps 250
evaluation.task_steps=300 training.eval_steps=0.25
    evaluation.task_steps: is 300, no multiple of training.eval_steps 250
checkpoints.keep_best=2 training.save_steps=4 training.eval_steps=0.25
    training.save_steps (now 4) to a multiple of training.eval_steps (now 250)
checkpoints.keep_best=2 training.eval_strategy=epoch
    checkpoints.keep_best: is 2, but not every save is validated
'evaluation.tasks=["arc"]' evaluation.metric=arc/acc evaluation.task_steps=500
    arc/acc is wanted at each validation
evaluation.prompt=3
    write "3" with quotes
training.bf16=true training.fp16=true
    choose one
llama model.num_key_value_heads=3
    num_key_value_heads: is 3, which does not divide model.num_attention_heads 4
experts model.num_experts_per_tok=9
    is 9, more than model.num_experts 4
llama model.model_type=deepseek_v3 model.n_routed_experts=10 model.n_group=4
    model.n_group: is 4, which does not divide model.n_routed_experts 10
speed.compile=whole --deepspeed=zero3
    speed.compile: is whole, and ZeRO-3 gathers the weights by hooks, at each of which a graph ends; --set
experts training.activation_checkpointing_kwargs.use_reentrant=true
    is true, and then losses that balance experts have no gradient
training.activation_checkpointing_kwargs.preserve_rng_state=false model.resid_pdrop=0.1
    preserve_rng_state: is false, and the second pass would drop other places (model.resid_pdrop)
--deepspeed=zero2:reduce=fp16
    deepspeed: zero2:reduce=fp16 adds gradients up in fp16, in which small ones vanish
speed.recompute=operators speed.compile=blocks training.activation_checkpointing=true
    speed.compile blocks hides the products that are kept
optimizer.adaptive_clip=0.01 training.fp16=true --deepspeed=zero0
    where DeepSpeed keeps copies of its own; use --deepspeed
speed.fp8=rowwise
    gpt2 has convolutions in their place; --set
model.attn_implementation=flash_atention_2
    model.attn_implementation: is "flash_atention_2", which is no attention; did you mean 'flash_attention_2'?
model.attn_implementation=sdpa_causal data.document_masking=true
    model.attn_implementation: is sdpa_causal, which is not known to keep documents apart
model.attn_implementation=some/kernel data.document_masking=true
    model.attn_implementation: is some/kernel, which is not known to keep documents apart
wsd 'training.lr_scheduler_kwargs={"num_decay_steps": 10, "min_lr_rate": 0.1}'
    training.lr_scheduler_kwargs.min_lr_rate: is no keyword of warmup_stable_decay; did you mean 'min_lr_ratio'?
wsd 'training.lr_scheduler_kwargs={"num_decay_steps": 5000}'
    more than the run's 1000 steps
wsd training.lr_scheduler_kwargs={}
    num_decay_steps: is missing: warmup_stable_decay needs the number of its last steps
'training.lr_scheduler_kwargs={"min_lr": 1e-5, "min_lr_rate": 0.1}'
    training.lr_scheduler_kwargs: needs exactly one of min_lr, min_lr_rate; it has min_lr and min_lr_rate
training.lr_scheduler_type=constant
    is no keyword of constant; it takes none: --set training.lr_scheduler_kwargs={}
training.lr_scheduler_type=greedy training.lr_scheduler_kwargs={} training.warmup_steps=0 training.eval_strategy=no
    follows the validation loss, and nothing is validated
training.lr_scheduler_type=reduce_lr_on_plateau training.lr_scheduler_kwargs={} training.eval_strategy=epoch
    follows the validation loss, and nothing is validated before the end
training.lr_scheduler_type=greedy training.lr_scheduler_kwargs={} training.learning_rate=0.0003
    min_lr: is 0.001 if it is left out, which is not below training.learning_rate 0.0003: lower it
training.lr_scheduler_type=reduce_lr_on_plateau 'training.lr_scheduler_kwargs={"min_lr": 0.01}'
    training.lr_scheduler_kwargs.min_lr: is 0.01, which is not below training.learning_rate 0.005: lower it
'training.lr_scheduler_kwargs={"min_lr": 0.005}'
    training.lr_scheduler_kwargs.min_lr: is 0.005, which is not below
training.lr_scheduler_type=cosine_warmup_with_min_lr 'training.lr_scheduler_kwargs={"min_lr": 1}'
    training.lr_scheduler_kwargs.min_lr: is 1, which is not below
training.lr_scheduler_type=polynomial 'training.lr_scheduler_kwargs={"lr_end": 1}'
    training.lr_scheduler_kwargs.lr_end: is 1, which is not below
model.initializer_range=-1
    model.initializer_range: is -1.0; it must be greater than 0
model.n_inner=0
    model.n_inner: is 0; it must be at least 1
'model.eos_token_id=[1, 99999999999]'
    model.eos_token_id.1: is 99999999999; it must be at most
model.eos_token_id=8192000
    model.eos_token_id: is 8192000, beyond model.vocab_size
model.activation_function=gelu_nw
    did you mean 'gelu_new'?
model.resid_pdrop=8
    model.resid_pdrop: is 8; it must be less than 1
training.include_num_input_tokens_seen=true
    training.include_num_input_tokens_seen: does not belong here: every row of metrics.jsonl counts the tokens
training.label_smoothing_factor=0.1
    training.label_smoothing_factor: does not belong here
training.skip_memory_metrics=false
    training.skip_memory_metrics: does not belong here: what it measures is shown nowhere
training.ddp_static_graph=true
    training.ddp_static_graph: does not belong here: ranks fail with it
training.fsdp=full_shard
    training.fsdp: does not belong here: not supported: ranks are sharded by DeepSpeed, as a file of ds_configs/
training.use_liger_kernel=true
    Liger has no kernels for gpt2
'training.activation_checkpointing_kwargs={"use_reentrat": false}'
    use_reentrat: unknown key; did you mean 'training.activation_checkpointing_kwargs.use_reentrant'
loss.router_z_loss=0.001
    loss.router_z_loss: needs a mixture of experts
budget.tokens={2**59} budget.tokens_per_step={2**59} 'budget.ramp={"from_tokens_per_step": 128, "over_tokens": 1024}'
    budget.ramp.increment: is 128, which makes 4503599627370495 stairs
training.per_device_train_batch_size={2**63}
    training.per_device_train_batch_size: is 9223372036854775808; it must be at most 1048576
training.dataloader_num_workers=65536
    training.dataloader_num_workers: is 65536; it must be at most 1024
training.debug=overflow
    did you mean 'underflow_overflow'?
training.save_steps=1.5
    training.save_steps: is 1.5; write a whole number
training.optim_args=momentum
    training.optim_args: is "momentum"; write name=value
'evaluation.hellaswag=""'
    evaluation.hellaswag: is empty; write a name, or leave it out
'evaluation.tasks=["arc_easy", ""]'
    evaluation.tasks.1: is empty
'data.filters=[{"rule": "length"}]'
    data.filters.0: needs at least one of min_words, max_words, min_characters, max_characters
'data.filters=[{"rule": "length", "min_words": 9, "max_words": 3}]'
    data.filters.0.min_words: min_words is 9, more than max_words 3
'data.filters=[{"rule": "blocklist"}]'
    data.filters.0: needs at least one of words, path, languages
'data.filters=[{"rule": "language", "languages": ["eng"]}]'
    data.filters.0.languages.0: is the string "eng", not one of
'data.filters=[{"rule": "callable", "import": "keep"}]'
    data.filters.0.import: is 'keep', which no extension defines with @extend.filter
'data.dedup={"minhash": {"bands": 4}}'
    data.dedup.minhash.rows: is missing, and goes with bands
data.decontaminate={}
    data.decontaminate: names no evaluation sets
'data.decontaminate={"tasks": ["arc_easy"], "shortest": 20}'
    data.decontaminate.shortest: is 20, more than data.decontaminate.ngram 13
named 'data.mixture={"stages": [{"weights": {"nots": 1}}]}'
    names no source; did you mean 'notes'
data.name={"x" * 201}
    data.name: has 201 bytes; it must have at most 200
llama loss.router_z_loss=0.1
    loss.router_z_loss: needs a mixture of experts with model.output_router_logits true; set it
llama model.model_type=deepseek_v3 model.output_router_logits=false
    model.output_router_logits: is false, so that nothing balances the experts; leave it out
llama model.model_type=deepseek_v3 model.num_mtp_layers=1
    model.num_mtp_layers: is 1, and nothing here trains layers that predict further tokens; leave it out, or set it to 0
llama model.model_type=gemma2 loss.kind=fused
    loss.kind: is fused: final_logit_softcapping is 30, and a fused loss never has the logits; use chunked
llama model.model_type=deepseek_v3 model.n_group=2 model.topk_group=4
    model.topk_group: is 4, more than model.n_group 2
llama model.initializer_range=3
    model.initializer_range: is 3.0; it must be at most 1
llama model.model_type=qwen3 model.head_dim=16 'model.layer_types=["full_attention"]'
    model.layer_types: has 1 entries, and model.num_hidden_layers is 2
llama model.model_type=qwen3 model.head_dim=16 'model.layer_types=["full_attention", ""]'
    model.layer_types.1: is ""; it must be full_attention or sliding_attention
llama model.model_type=qwen3 model.head_dim=16 'model.layer_types=["full_attention", "sliding_attention"]'
    needs model.use_sliding_window true
experts model.decoder_sparse_step=65536
    layers with experts; change it, or take model_type qwen3
experts 'model.mlp_only_layers=[0, 1, 2]'
    layers with experts; change it, or take model_type qwen3
optimizer.polynomial=steepest
    optimizer.polynomial: is the string "steepest", not one of "steep", "converging", "polar_express"; did you mean
optimizer.name=muon --deepspeed=zero3_offload
    muon runs where its weights are; offload_optimizer would replace it by DeepSpeed's CPU Adam; use --deepspeed
speed.compile=blocks speed.compile_mode=reduce-overhead --deepspeed=zero3
    _mode: is reduce-overhead, which records CUDA graphs of weights that stay where they are, and ZeRO-3 moves them; --
training.optim=adafactor
    whose update looks at whole parameters, and ZeRO-2 gives it slices; use --deepspeed null or zero0
training.optim=adagrad
    is adagrad, which DeepSpeed builds anew for ZeRO-2, without weight decay and groups; use --deepspeed null or zero0
training.optim=lomo
    training.optim: is lomo, which steps inside the backward pass, before gradients are whole; --set
training.optim=sgd --deepspeed=zero2_offload
    training.optim: is sgd, but offloading the optimizer replaces it by DeepSpeed's CPU Adam; --set
optimizer.name=muon training.optim=sgd
    optimizer.name: muon has groups of its own for AdamW, and training.optim=sgd is another optimizer
training.optim=adamw_8bit --deepspeed=zero3
    training.optim: is adamw_8bit, whose update looks at whole parameters, and ZeRO-3 gives it slices
training.optim=adamw_torch_8bit --deepspeed=zero0
    cannot hold (adamw_bnb_8bit keeps plain ones)
schedule_free optimizer.average_decay=0.9
    optimizer.average_decay: is set, but schedule_free_adamw averages
optimizer.average_decay=0.9 --deepspeed=zero3_nvme
    optimizer.average_decay: needs five buffers on NVMe
optimizer.average_decay=1
    optimizer.average_decay: is 1
evaluation.metric=average_loss
    evaluation.metric: is 'average_loss', which no validation
schedule_free training.lr_scheduler_type=cosine
    training.lr_scheduler_type: is cosine, but schedule_free_adamw does without a decay; write constant or
schedule_free training.lr_scheduler_type=warmup_stable_decay
    is warmup_stable_decay, but schedule_free_adamw does without a decay; write constant or
schedule_free training.adam_beta1=0.0
    training.adam_beta1: is 0: schedule_free_adamw would train weights that do not tell their average; write 0.9
'budget.ramp={"from_tokens_per_step": 1000, "over_tokens": 20480}'
    budget.ramp.from_tokens_per_step: 1000 is not a multiple of the sequence length 128; the nearest are 896 and
'budget.ramp={"from_tokens_per_step": 512, "over_tokens": 20480, "increment": 896}'
    budget.ramp.increment: 896 does not lead from 512 to 2048 in whole stairs; the nearest that does is 768
'budget.ramp={"from_tokens_per_step": 2048, "over_tokens": 20480}'
    not below budget.tokens_per_step 2048
'budget.ramp={"from_tokens_per_step": 512, "over_tokens": 9999999999}'
    more than budget.tokens
'budget.ramp={"from_tokens_per_step": 512}'
    budget.ramp.over_tokens: is missing
budget.warmup_tokens=2048
    budget.warmup_tokens: and training.warmup_steps are both there
budget.warmup_tokens=2048 training.warmup_steps=0 training.lr_scheduler_type=constant
    budget.warmup_tokens: is set, but training.lr_scheduler_type constant has no warm-up; write constant_with_warmup
budget.decay_tokens=2048
    budget.decay_tokens: is for training.lr_scheduler_type warmup_stable_decay
budget.warmup_tokens=2048000 budget.decay_tokens=2048 training.warmup_steps=0
    budget.decay_tokens: is 2048; warm-up and decay together take 2050048, more than budget.tokens 2048000
wsd training.lr_scheduler_kwargs={} budget.decay_tokens=0.2 training.warmup_steps=900
    budget.decay_tokens: is 200 steps; with 900 steps of warm-up that is more than the run's 1000 steps
wsd 'training.lr_scheduler_kwargs={"num_decay_steps": 1}' budget.decay_tokens=2048
    budget.decay_tokens: and training.lr_scheduler_kwargs.num_decay_steps are both there
'optimizer.groups=[{"kind": "hidden", "names": "*"}]'
    needs exactly one of kind, names
'optimizer.groups=[{"kind": "hidden", "momentum": [["end", 0], [10, 0]]}]'
    momentum.1: is at step 10, before the one
'optimizer.groups=[{"kind": "hidden", "momentum": [[0, 0.5, "wave"]]}]'
    is [0, 0.5, "wave"]; write [place, value]
'optimizer.groups=[{"kind": "hidden", "momentum": [[0, 1]]}]'
    has the value 1; it must be at least 0 and less than 1
'optimizer.polynomial=[[1, 2, 3], [1, 2, 3, 4]]'
    optimizer.polynomial: has [1, 2, 3, 4]; write the three coefficients
training.lr_scheduler_type=piecewise training.lr_scheduler_kwargs={}
    lr_scheduler_kwargs: needs exactly one of points; it has none
training.lr_scheduler_type=piecewise 'training.lr_scheduler_kwargs={"points": [[0, 1]]}'
    training.warmup_steps: is given, but piecewise has its warm-up in its points
monitors.profile.steps=[5,2]
    monitors.profile.steps: is [5, 2]; write the first and the last step
monitors.profile.steps=[1,2,3]
    write the first and the last step
monitors.profile.steps=5000
    is 5000, but the run has 1000 steps
monitors.profile.steps=0
    at least 1
monitors.profile.memory=true
    monitors.profile.steps: is missing
monitors.profile.step=3
    did you mean 'monitors.profile.steps'
monitors.spikes.policy=skip monitors.spikes.rule=deviations training.fp16=true
    monitors.spikes.rule: is deviations, whose refused steps would lower
mup.base_layers=2
    mup.base_layers: is set without mup.base_width
mup.base_width=64 mup.base_head_size=8
    grow by more heads of the same size
mup.base_width=64 --deepspeed=zero2_offload
    muP runs where its weights are
mup.base_width=64 training.optim=sgd
    training.optim=sgd is another optimizer
mup.base_width=256 --recipe=moe-1.5b
    no rule here for the routers and experts of mixtral
speed.compile=blocks --deepspeed=zero3_nvme
    speed.compile: a compiled block needs all its weights
speed.compile=deepcompile --deepspeed=zero0
    speed.compile: is deepcompile, which needs ZeRO
speed.compile=deepcompile --deepspeed=zero3_offload
    speed.compile: is deepcompile, which is not tried with offload
speed.compile=deepcompile --deepspeed=zero3
    speed.compile: is deepcompile, and loss.kind auto leaves the head out of its graph; --set loss.kind=plain
speed.compile=whole speed.compile_backend=aot_eager speed.compile_mode=max-autotune
    speed.compile_mode: is max-autotune, a mode of inductor
speed.fp8=tensorwise training.bf16=false --recipe=qk-norm --deepspeed=zero2
    goes with training.bf16
optimizer.qk_clip=9 --recipe=qk-norm
    optimizer.qk_clip: does not hold for qwen3 (its logits do not
optimizer.qk_clip=9 speed.compile=whole --deepspeed=zero1 --recipe=124m
    optimizer.qk_clip: ends a graph at every attention
"""
"""What is set over `features/gpt2` or `--recipe`, as a shell takes it, and below it what is said."""
CONSTANT = ("lr_scheduler_type=constant_with_warmup", "lr_scheduler_kwargs={}")
SHORT = {
    "llama": [f"model={json.dumps({**LLAMA, 'vocab_size': 1024})}", "data.sequence_length=64"],
    "experts": [f"model={json.dumps({**EXPERTS, 'vocab_size': 1024})}", "data.sequence_length=64"],
    "named": [
        'data.sources=[{"path": "x.txt", "name": "notes", "weight": 1}, {"path": "y.txt", "weight": 1}]'
    ],
    "wsd": ["training.lr_scheduler_type=warmup_stable_decay"],
    "schedule_free": [f"training.{each}" for each in ("optim=schedule_free_adamw", *CONSTANT)],
}
PLAIN = ("null", 1, "plain")
LARGE = {"{2**59}": str(2**59), "{2**63}": str(2**63), '{"x" * 201}': "x" * 201}


def by_line(text: str) -> dict[str, str]:
    """{what is typed: what is said}"""
    lines = text.strip().splitlines()
    return {typed: said.strip() for typed, said in zip(lines[::2], lines[1::2], strict=True)}


REFUSED = by_line(GIVEN)


def settings_of(typed: str) -> tuple[list[str], dict[str, str]]:
    """The `--set` texts, and {option: value} of the others."""
    for name, value in LARGE.items():
        typed = typed.replace(name, value)
    words = [each for word in shlex.split(typed) for each in SHORT.get(word, [word])]
    options = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
    return [word for word in words if not word.startswith("--")], options


def refused(settings: list[str], deepspeed: str | None = None, recipe: str = "features/gpt2") -> str:
    """The one line of the error."""
    return refusal(load_recipe_and_ds_config, recipe, settings, deepspeed)


NOT_ENOUGH = {"model.n_embd", "speed.compile=deepcompile --deepspeed=zero0"}
"""Of these one is told how values are written, and the other one has a second fault."""


@pytest.mark.parametrize("typed", REFUSED)
def test_what_is_wrong_is_one_line_with_its_key_and_the_remedy(typed):
    """Strict recipe, also what a library would refuse only in training, and names that lead out of runs/ or data/.

    Each `--set` or `--deepspeed` of the line, added to the command that was refused, makes it run.
    """
    settings, options = settings_of(typed)
    text, recipe = refused(settings, **options), options.get("recipe", "features/gpt2")
    assert REFUSED[typed] in text
    assert text.startswith((f"recipes/{recipe}.json", *(f"--set {each}" for each in settings)))
    for remedy in re.findall(r"--deepspeed \w+|--set [^\s,;]+(?: --set [^\s,;]+)*", text.rpartition(": ")[2]):
        words = [word for word in remedy.split() if not word.startswith("--")]
        more, way = (words, options.get("deepspeed")) if "--set" in remedy else ([], words[0])
        assert typed in NOT_ENOUGH or load_recipe_and_ds_config(recipe, [*settings, *more], way)


OPTIM_ARGS = by_line("""
adamw_torch_fused amsgrad=True
    has amsgrad, which nothing reads with training.optim=adamw_torch_fused; leave it out
adamw_torch beta1=0.1
    which nothing reads with training.optim=adamw_torch; write training.adam_beta1
adafactor beta1=0.9
    which nothing reads with training.optim=adafactor; leave it out
adamw_bnb_8bit eps=1e-6
    which nothing reads with training.optim=adamw_bnb_8bit; write training.adam_epsilon
ademamix nonsense=1
    has nonsense, which nothing reads
sgd momentm=0.9
    has momentm, which nothing reads with training.optim=sgd; did you mean 'momentum'?
sgd momentum=0.9,weight_decay=0.9
    has weight_decay, which nothing reads with training.optim=sgd; write training.weight_decay
sgd momentum=high
    which sgd does not take (could not convert string to float: 'high'); change it, or leave it out
sgd nesterov=true
    which sgd does not take (Nesterov momentum requires a momentum
rmsprop weight_decay=0.9
    write training.weight_decay
rmsprop_bnb alpha=0.5
    which rmsprop_bnb does not take (transformers hands alpha on as text)
adagrad initial_accumulator_value=1
    has initial_accumulator_value, which nothing reads
""")
"""`training.optim` and `training.optim_args`, and below them what a start says."""
READ = "ademamix alpha=5.0,beta3=0.9999", "sgd momentum=0.9,nesterov=true", "adagrad lr_decay=0"


@pytest.mark.parametrize("typed", [*OPTIM_ARGS, *READ])
def test_what_an_optimizer_does_not_read_is_refused_at_the_start(typed, tmp_path):
    """As transformers chooses class and keywords; a value that is the default is read too."""
    optim, given = typed.split()
    if "bnb" in optim or optim == "ademamix":
        pytest.importorskip("bitsandbytes")
    settings = [f"training.optim={optim}", f'training.optim_args="{given}"']
    recipe = load_recipe("features/gpt2", settings)
    arguments, said = build_arguments(recipe, None, tmp_path, 1), OPTIM_ARGS.get(typed, "")
    line = refusal(check_optimizer, recipe, arguments) if said else check_optimizer(recipe, arguments)
    assert said in line and ("training.optim_args: " in line) == bool(said)


def test_a_start_refuses_them_before_it_writes_and_notes_keys_of_adam_that_are_not_read(workshop, tmp_path):
    """One line and no run; a recipe may have Adam's keys from the one that it is a variant of."""
    wrong = execute(
        workshop.command(tmp_path / "run", *PLAIN, ("training.optim=sgd", 'training.optim_args="lr=1"'))
    )
    assert wrong.code == 2 and wrong.stderr.count("error: ") == 1, wrong.output
    assert "; write training.learning_rate" in wrong.stderr and not (tmp_path / "run/recipe.json").exists()
    finished = execute(workshop.command(tmp_path / "run", *PLAIN, ("training.optim=sgd",)))
    assert finished.code == 0, finished.output
    assert "training.adam_beta2, training.adam_epsilon: not read by training.optim=sgd" in finished.stderr


def test_plan_preparation_and_training_refuse_with_the_same_line(tmp_path):
    """Each of the real commands reads its recipe by the same function; nothing is written by any of them."""
    recipe = json.loads((load_recipe("features/gpt2").path).read_text())
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({**recipe, "deepspeed": "zero3"}))
    words = ["--recipe", path, "--set", "speed.compile=whole", "--data_dir", tmp_path / "data"]
    train = [sys.executable, "train.py", *words, "--output_dir", tmp_path / "run"]
    commands = [train, [*train, "--plan"], [sys.executable, "data_prep.py", *words]]
    lines = {(finished.code, finished.stderr) for finished in map(execute, commands)}
    assert len(lines) == 1, lines
    ((code, line),) = lines
    assert code == 2 and line.count("\n") == 1 and line.startswith("error: ")
    assert [each.name for each in tmp_path.iterdir()] == ["recipe.json"]


LAUNCHER = {
    "ACCELERATE_USE_FSDP": (
        "true",
        "distributed_type FSDP: not supported: take a file of accelerate_configs/",
    ),
    "ACCELERATE_USE_MEGATRON_LM": ("true", "distributed_type MEGATRON_LM: not supported"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("true", "parallelism_config: not supported"),
    "ACCELERATE_DYNAMO_BACKEND": ("INDUCTOR", "dynamo_backend inductor: the recipe compiles"),
    "ACCELERATE_MIXED_PRECISION": ("fp16", "mixed_precision fp16: the recipe decides the precision"),
}


@pytest.mark.parametrize("variable", LAUNCHER)
def test_what_an_accelerate_config_asks_for_beside_the_recipe_is_refused(variable, monkeypatch):
    """It would change the run without a word: FSDP would be switched on, fp16 would take the place of fp32."""
    value, words = LAUNCHER[variable]
    monkeypatch.setenv(variable, value)
    assert f"accelerate's config: {words}" in refused([])


def test_a_stage_in_an_accelerate_config_is_refused_and_what_it_says_as_the_recipe_does_is_taken(monkeypatch):
    """Its ds_config is a file: what stands beside it would be left out by the plan and refused by accelerate."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert "accelerate's config: zero_stage 3: a ds_config says how to shard" in refused([])
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds_configs/zero3.json")
    load_recipe_and_ds_config("features/gpt2")
    for variable in LAUNCHER:
        monkeypatch.setenv(variable, "no" if "USE" not in variable else "false")
    load_recipe_and_ds_config("features/gpt2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    load_recipe_and_ds_config("features/gpt2", ["training.bf16=true"])


def test_ranks_that_cannot_be_grouped_are_refused():
    """Hierarchical ZeRO-3 keeps its second copy of the weights in groups of equal size."""
    with pytest.raises(UserError, match="zero_hpz_partition_size is 8, which does not divide 12 ranks"):
        load_recipe_and_ds_config("30b", deepspeed="zero3_hpz", world_size=12)


def test_schedules_take_the_keywords_that_transformers_takes():
    """A new version of transformers that adds or drops one fails here."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR

    ours = {"optimizer", "last_epoch", "num_warmup_steps", "num_training_steps"}
    by_metric = {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": GreedyLR}
    for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items():
        function = by_metric.get(kind.value, function)
        assert set(inspect.signature(function).parameters) - ours == set(KEYWORDS[kind.value]), kind.value
    assert set(KEYWORDS) == {kind.value for kind in TYPE_TO_SCHEDULER_FUNCTION}


def test_random_recipes_get_a_plan_or_one_line(workshop):
    """No traceback from a recipe. The short version of benchmarks/recipe_fuzz.py."""
    fuzz = RecipeFuzz(_seed(), trains=False)
    for _ in range(200):
        settings, stage = fuzz.draw(), fuzz.draw_stage()
        outcome = plan_outcome(workshop, settings, stage, fuzz.random.choice((1, 2)))
        assert outcome.kind != "defect", (settings, stage, outcome.said)


def test_plan_preparation_and_start_agree_on_random_recipes(workshop):
    """What data_prep.py or train.py refuses before text is read or a step made, the plan refuses with the same line.

    Fifteen types of models, all filters. The short version of benchmarks/recipe_fuzz.py.
    """
    kinds = Counter()
    for settings, stage, planned, wrong in checked_recipes(workshop, 60, _seed()):
        assert not wrong, (settings, stage, wrong)
        kinds[planned.kind] += 1
    assert min(kinds["ran"], kinds["refused"]) > 7


def test_random_recipes_train_or_are_refused_by_the_plan_too(workshop, tmp_path):
    """Three real steps each: a run, or one line that the plan says as well unless this machine is the reason.

    Over ten seconds, for it builds and trains eight models; benchmarks/recipe_fuzz.py trains hundreds.
    """
    fuzz = RecipeFuzz(_seed(), trains=True)
    for number in range(8):
        settings, stage, ranks = fuzz.draw(), fuzz.draw_stage(), 2 * (number % 3 == 0)
        planned = plan_outcome(workshop, settings, stage, max(1, ranks))
        if planned.kind == "refused":
            continue
        trained = training_outcome(workshop, settings, stage, ranks, tmp_path / str(number))
        drawn = settings, stage, ranks, trained.said
        assert trained.kind != "defect" and not is_looser(planned, trained), drawn


def _seed() -> int:
    """Of the recipes drawn here; another one draws others."""
    seed = int(os.environ.get("RECIPE_FUZZ_SEED") or 1)
    print(f"recipes of RECIPE_FUZZ_SEED={seed}")
    return seed
