"""What our own sections of a recipe hold, beside data, budget, optimizer and mup, which have modules of their own.

`Weights` is no section in the file: its keys are in `model`, beside the config's.
"""

import re
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar, Literal

from pretraining.outside.addresses import slip_in
from pretraining.outside.masking import masked
from pretraining.outside.schema import Wrong
from pretraining.recipe.optimizer import InitialRow
from pretraining.recipe.section import RECIPES, TEXT, Section, described, key


def is_in(module: str, pattern: str) -> bool:
    """Return whether the last parts of a module's name match, or those of a module around it: mlp, layers.0.*."""
    parts = module.split(".")
    around = (".".join(["", *parts[:end]]) for end in range(1, len(parts) + 1))
    return any(fnmatchcase(name, f"*.{pattern}") for name in around)


class Weights(Section):
    """What a model begins with, and what of it is trained: the keys of `model` that are ours and never reach its
    config."""

    initial_weights: str | None = key(default=None, omitted=True, minLength=1)
    """What training begins with in place of drawn weights: a name on the hub (org/model, or org/model@revision), or a
    folder of safetensors, of torch files or of torch.distributed.checkpoint; a run's export too."""
    frozen: list[str] | None = key(default=None, omitted=True, minItems=1, items={"minLength": 1})
    """Names of parameters that stay as they are, * for any characters: transformer.wte.*; each must match one."""
    draw: list[InitialRow] | None = key(default=None, omitted=True, minItems=1)
    """How matrices are drawn, by kind or by names; of several rows that match one, the last counts."""
    keep_in_fp32: list[str] | None = key(
        default=None, omitted=True, minItems=1, uniqueItems=True, items={"minLength": 1}
    )
    """Beside layers in bf16: embeddings: their weights, looked up (and added, in gpt2) in fp32; head: its weights and
    the product that gives the logits; else modules, by the last parts of their names, * for any characters: norm,
    mlp.gate, layers.0.self_attn; each must match one. A tied weight is both embeddings and head. gpt2, llama, qwen3 and
    their mixtures."""
    TABLES: ClassVar[tuple[str, ...]] = ("embeddings", "head")
    """Words of `keep_in_fp32`; what else it names are modules."""

    PUBLISHED: ClassVar[dict[str, dict]] = {
        "from": described(
            "Where the shape is: a name on the hub (org/model), a folder or a config.json, of which nothing else is "
            "fetched; keys beside it replace those that are read.",
            **TEXT,
        ),
        "revision": described("Branch, tag or commit of from; a run's recipe.json has the commit.", **TEXT),
        "digest": described(
            "Of the config.json, in a run's recipe.json, whose model is whole: from is not read again.",
            type="string",
            pattern="sha256:[0-9a-f]{64}",
        ),
    }
    """Schemas of the keys of `model` that say where its shape comes from; `from` cannot be the name of a field."""

    @classmethod
    def split(cls, model: dict) -> tuple[dict, dict, dict]:
        """Return the config's keys, the section's own, and those of `PUBLISHED`."""
        groups: tuple[dict, dict, dict] = ({}, {}, {})
        for name, value in model.items():
            groups[1 if name in cls.names() else 2 if name in cls.PUBLISHED else 0][name] = value
        return groups

    @classmethod
    def model_keys(cls) -> dict[str, dict]:
        """Return schemas of all keys of `model` that are ours."""
        return {**cls.PUBLISHED, **cls.schema(described=True)["properties"]}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(each.name for each in fields(cls))

    @property
    def wide_tables(self) -> set[str]:
        return {*self.TABLES} & {*(self.keep_in_fp32 or ())}

    @property
    def names_modules(self) -> bool:
        """Whether `keep_in_fp32` names more than tables."""
        return {*(self.keep_in_fp32 or ())} > self.wide_tables

    def has_wide(self, module: str) -> bool:
        """Return whether `keep_in_fp32` names a module, or one around it."""
        return any(is_in(module, name) for name in self.keep_in_fp32 or () if name not in self.TABLES)

    def freezes(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.frozen or ())


class Loss(Section):
    """How the training loss is computed; kind, chunk_tokens and compile are memory and speed, not the
    curve."""

    kind: Literal["auto", "plain", "chunked", "fused"] = key(default="auto")
    """plain: logits in fp32; chunked: no fp32 copy; fused: one chunk of the logits at a time; auto: fused where the
    head allows it, else chunked."""
    chunk_tokens: int | None = key(default=None, minimum=1)
    """Tokens in a chunk; null: as many as take a GiB, a 64th of a smaller GPU's memory, or 256 MiB on a processor."""
    compile: bool | None = key(default=None)
    """torch.compile of a chunked or fused loss, at any ZeRO stage: logits are read twice and written once; null: on a
    GPU. If it fails, the run says so and goes on without."""
    z_loss: float = key(default=0.0, minimum=0)
    """Weight of log(Z)^2, which keeps the logits from drifting (1e-4 in PaLM); in the training loss only."""
    function: str | None = key(default=None, minLength=1)
    """A loss of an extension, in the place of the cross-entropy while training; null: the cross-entropy. Validation
    measures the cross-entropy in any case."""
    arguments: dict = key(default={})
    """Keyword arguments of function."""
    balance: Literal["auto", "none"] = key(default="auto")
    """What keeps the experts of a mixture equally used. auto: model.router_aux_loss_coef if the type has it; a
    correction bias follows the load if its routers have one; else balance_weight. none: nothing."""
    balance_weight: float = key(default=0.001, only_with=("balance",), minimum=0)
    """Weight of the balancing loss (Fedus et al. 2021) of a type without router_aux_loss_coef and correction bias."""
    bias_rate: float = key(default=0.001, only_with=("balance",), minimum=0)
    """What a step adds to the correction bias of an expert with less than an even share of the tokens, and takes from
    one with more (Wang et al. 2024; 0.001 in DeepSeek-V3)."""
    sequence_balance: float = key(default=0.0001, only_with=("balance",), minimum=0)
    """Weight of the balancing loss over each sequence, beside a correction bias (1e-4 in DeepSeek-V3)."""
    router_z_loss: float = key(default=0.0, minimum=0)
    """The same for a mixture's routers (1e-3 in ST-MoE), a mean over tokens and layers; needs
    model.output_router_logits."""

    def check_together(self, at: str) -> Wrong:
        """A function of the user's own gets all logits, and is the whole loss of a token."""
        if self.function is None:
            if self.arguments:
                yield f"{at}.arguments", "is set without function; name one, or leave it out"
            return
        if self.kind not in ("auto", "plain"):
            what = f"is {self.kind}, but {at}.function needs all logits; write plain, or leave it out"
            yield f"{at}.kind", what
        if self.z_loss:
            yield f"{at}.z_loss", f"goes with the cross-entropy; add it in {self.function}"


class Speed(Section):
    """What makes a step faster; fp8 alone changes what it computes."""

    compile: Literal["auto", "none", "blocks", "whole", "deepcompile"] = key(default="auto")
    """torch.compile of the training passes: of every block by itself (one graph, compiled once for all layers) or of
    the whole model (not with ZeRO-3). auto: blocks on a GPU, uncompiled where that fails. deepcompile: DeepSpeed's
    passes over the whole model, with ZeRO-3 too; untested."""
    compile_backend: Literal["inductor", "cudagraphs", "aot_eager", "eager"] = key(default="inductor")
    """torch.compile's backend; the last two trace and do not generate code."""
    compile_mode: Literal["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = key(
        default=None
    )
    """inductor's mode: reduce-overhead records CUDA graphs, for small models; null: default."""
    recompute: Literal["layers", "operators"] = key(default="layers")
    """What of a layer under training.activation_checkpointing is computed again: layers: all but its input; operators:
    only what is cheap (norms, activation functions, copies), products and attention are kept. gpt2, llama and qwen3,
    uncompiled."""
    fp8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = key(default="none")
    """fp8 products in the blocks' linear layers, by torchao's recipes of scales: Hopper and later, bf16, not gpt2."""
    bf16_blocks: list[int] = key(default=[0, 0], minItems=2, maxItems=2, items={"minimum": 0})
    """With fp8: so many of the first blocks, and of the last ones, multiply in bf16."""
    bf16_layers: list[str] = key(default=[], items={"minLength": 1})
    """With fp8: modules whose layers multiply in bf16, by the last parts of their names, * for any characters:
    down_proj, layers.0.self_attn; each must match one."""
    bf16_decay: bool = key(default=False)
    """With fp8: bf16 from the step on at which the rate of warmup_stable_decay begins to fall."""

    def is_in_fp8(self, layer: str, block: int, num_blocks: int) -> bool:
        """Return whether a linear layer of that name, in that block, is trained in fp8."""
        first, last = self.bf16_blocks
        is_between = first <= block < num_blocks - last
        return is_between and not any(is_in(layer, pattern) for pattern in self.bf16_layers)


ROLLBACK = ("policy=rollback",)


class Spikes(Section):
    """Losses far above their course, and streaks of steps that are not finite; judged every step on the
    mean over all ranks."""

    policy: Literal["log", "skip", "rollback", "stop"] = key(default="log")
    """log: an event. skip: such a step is not applied. rollback: back to the last good checkpoint, without the samples
    around the spike. stop: exit code 77."""
    rule: Literal["robust", "deviations"] = key(default="robust")
    """What makes a spike. robust: a loss so many robust deviations above its course, in logarithms. deviations: a loss
    or a gradient norm so many standard deviations above its mean over the window (with skip, OLMo 3's rule)."""
    score: float = key(default=6.0, minimum=1)
    """So many deviations."""
    window: int = key(default=128, minimum=32, maximum=65536)
    """Steps that the noise is measured on; with rule deviations the mean too, and from half of them on."""
    non_finite_streak: int = key(default=8, minimum=1)
    """So many steps in a row with a loss or gradients that are not finite count as a spike."""
    max_rollbacks: int = key(default=3, only_with=ROLLBACK, minimum=0)
    """Rollbacks in the whole run; then it stops with exit code 77."""
    skip_steps: int = key(default=8, only_with=ROLLBACK, minimum=1, maximum=10000)
    """With rollback: the samples of so many steps before the spike, and of as many from it on, are left out; fewer
    before it if no checkpoint is that old."""
    lr_factor: float = key(default=1.0, only_with=("lr_steps",), exclusiveMinimum=0, maximum=1)
    """Of the learning rate in the lr_steps steps after a rollback."""
    lr_steps: int = key(default=0, only_with=ROLLBACK, minimum=0)
    """How long lr_factor holds."""


_STEP = {"type": "integer", "minimum": 1}
_STEP_OR_STEPS = {"anyOf": [{"type": "array", "items": _STEP, "minItems": 2}, _STEP]}


class Profile(Section):
    """Steps to trace into runs/<name>/profile/, with a table of their costs; null: none."""

    steps: int | list[int] | None = key(default=None, schema=_STEP_OR_STEPS, omitted=True)
    """One step, or the first and the last one: [10, 12]."""
    memory: bool = key(default=True)
    """With a snapshot of every allocation on the GPU."""
    every_rank: bool = key(default=False)
    """A trace of each rank; else of rank 0 alone."""

    def check_together(self, at: str) -> Wrong:
        """The steps are named, for there is no default: one, or the first and the last."""
        if self.steps is None:
            yield f"{at}.steps", "is missing; write one step, or the first and the last: [10, 12]"
        # the schema has checked that a list has two entries at least
        elif isinstance(self.steps, list) and (len(self.steps) > 2 or self.steps[0] > self.steps[-1]):
            yield f"{at}.steps", f"is {self.steps}; write the first and the last step: [10, 12]"


class Notify(Section):
    """Notices of a run's events to a command or a webhook of yours, sent behind training; null: none."""

    on: list[
        Literal[
            "started", "continued", "stopped", "hang", "rollback", "gave_up", "failed", "finished", "alert"
        ]
    ] = key(default=["stopped", "hang", "rollback", "gave_up", "failed", "finished"], minItems=1)
    """Of which events; alert: spikes, steps that are not finite, plateaus, starving experts, slow ranks, GPUs that have
    little to do, saves and uploads that failed."""
    command: str | None = key(default=None, minLength=1)
    """Shell command that gets the notice as JSON on its standard input, and as PRETRAINING_EVENT, _RUN, _FOLDER and
    _MESSAGE. No secrets in it: the shell replaces $NAME."""
    webhook_env: str | None = key(default=None)
    """Name of the environment variable with the address to which the notice is posted as JSON (Slack, Teams, Discord,
    your own)."""

    def check_together(self, at: str) -> Wrong:
        """Somebody receives the notices, and the recipe holds no secrets: it is kept in files and in stores."""
        command, variable = self.command or "", self.webhook_env
        if masked(command) != command or re.search(r"hooks\.slack\.com/|/api/webhooks/", command):
            remedy = "put it into a variable and write $NAME in its place"
            yield f"{at}.command", f"holds a secret, which would reach files and logs; {remedy}"
        if variable is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            remedy = "put the address into one, as in export MY_WEBHOOK=..., and write MY_WEBHOOK"
            yield f"{at}.webhook_env", f"is no name of a variable; {remedy}"
        if self.command is None and variable is None:
            yield at, "has no receiver; give command or webhook_env"


class RepeatedNgrams(Section):
    """Leave out a block in which some n-gram comes many times in a row, as OLMo does; null: none.

    It is listed in flagged_blocks.jsonl, and none of its tokens is a target.
    """

    longest: int = key(default=13, minimum=1, maximum=1024)
    """Tokens of the longest n-gram that is looked for."""
    times: int = key(default=32, minimum=2)
    """How often in a row it must come."""


class LowUse(Section):
    """An alert when the GPUs do too little for many steps in a row; null: none."""

    steps: int = key(default=200, minimum=1)
    """In a row."""
    gpu_utilization: float | None = key(default=0.5, exclusiveMinimum=0, maximum=1)
    """Below this mean use of the GPUs, as NVML reads it; null: whatever it is."""
    mfu_of_plan: float | None = key(default=0.6, exclusiveMinimum=0, maximum=1)
    """Below this share of the plan's MFU; null: whatever it is."""


class Prometheus(Section):
    """Where the numbers are that Prometheus gets, if training.report_to has prometheus."""

    port: int | None = key(default=9464, minimum=1, maximum=65535)
    """Rank 0 answers there at /metrics; null: on no port."""
    host: str = key(default="127.0.0.1", minLength=1)
    """The address that answers; 0.0.0.0 lets other machines ask."""
    textfile: str | None = key(default=None, pattern=r".*[^/]\.prom")
    """A file whose name ends in .prom, in the folder of node_exporter's textfile collector; replaced at each log. A
    relative path begins in the run folder; null: no file."""


class Monitors(Section):
    """What watches the run, and what it does about what it sees."""

    spikes: Spikes = key(default_factory=Spikes)
    hang_minutes: float | None = key(default=20, minimum=0.25, maximum=43200)
    """Minutes without progress (a step, a round of validation, a save) after which the run names the ranks that stand
    still, dumps every rank's stacks and exits with code 76; null: never."""
    flagged_blocks: Literal["log", "skip"] = key(default="log")
    """Blocks from which nothing can be learned (one token fills them, they repeat themselves, they do not decode): log:
    listed in flagged_blocks.jsonl and trained on. skip: listed, and none of their tokens is a target."""
    repeated_ngrams: RepeatedNgrams | None = key(default=None)
    plateau_steps: int | None = key(default=None, minimum=1)
    """An alert when the loss has not gained 0.1 % for so many steps; null: none."""
    noise_scale_steps: int | None = key(default=None, minimum=1)
    """Every so many steps the gradient noise scale is measured, and logged in tokens as stability/gradient_noise_scale:
    a batch well below it may grow; null: never."""
    layer_norms_steps: int | None = key(default=None, minimum=1)
    """Every so many steps the gradient norm of each layer is measured and logged as stability/gradient_norm/<layer>;
    null: only after an alert, as an event."""
    activations_steps: int | None = key(default=None, minimum=1)
    """Every so many steps the largest attention logit of each layer (before caps and biases) and the root mean square
    of its output are measured, as stability/attention_logit/<layer> and stability/activation/<layer>; null: never."""
    expert_load: bool = key(default=True)
    """Of a mixture of experts with output_router_logits: how evenly its experts are used, logged as
    stability/expert_load/..., and an alert when one starves."""
    source_loss: bool = key(default=True)
    """Of a mixture of sources: the training loss of each, logged as train/<source>_loss."""
    profile: Profile | None = key(default=None)
    notify: Notify | None = key(default=None)
    low_use: LowUse | None = key(default=None)
    prometheus: Prometheus = key(default_factory=Prometheus)

    @property
    def skips_blocks(self) -> bool:
        return self.flagged_blocks == "skip" or self.repeated_ngrams is not None


class Checkpoints(Section):
    """training.save_steps says how often, this section what stays."""

    keep_last: int | None = key(default=2, minimum=1)
    """Complete checkpoints to keep; null keeps all. Beside them stays the last one before warmup_stable_decay falls."""
    keep_best: int = key(default=0, minimum=0)
    """So many more: the best by evaluation.metric, which is the validation loss unless said otherwise; each save must
    then be validated (save_steps a multiple of eval_steps)."""
    keep_every: int | None = key(default=None, minimum=1)
    """Keep for ever the checkpoints whose step is a multiple of this."""
    demote_to_weights: bool = key(default=False, only_with=("keep_last",))
    """Of a checkpoint that goes, keep the weights as a from_pretrained folder weights-<step>/."""
    on_full_disk: Literal["stop", "continue"] = key(default="stop")
    """When a checkpoint finds no room: end the run in one line, or train on and try again at the next save."""
    background: bool = key(default=True)
    """Write behind training from a copy in host memory; false: training stands still while a checkpoint is written."""
    hours_between_failures: float | None = key(default=None, exclusiveMinimum=0)
    """Mean hours between failures of the whole job, for the plan's cadence of saves; null: those of Llama 3."""
    upload: str | None = key(default=None, minLength=1)
    """Where committed checkpoints also go, behind training: a folder, s3://bucket/runs, hf://..., any fsspec address;
    below it, the run's name. No credentials in it: the environment holds them."""
    upload_mirror: bool = key(default=True, only_with=("upload",))
    """Checkpoints that are removed here are removed there too."""
    time_limit_hours: float | None = key(default=None, exclusiveMinimum=0)
    """Wall-clock hours after which the run saves and stops (exit code 75); leave room for the save. null: no limit."""

    def check_together(self, at: str) -> Wrong:
        """No slip that makes a folder of an address."""
        if slip := slip_in(self.upload or ""):
            yield f"{at}.upload", slip


class Sampling(Section):
    """How samples are drawn; evaluation.sample_tokens is their length."""

    temperature: float = key(default=0.8, minimum=0)
    """0: the likeliest token each time."""
    top_k: int | None = key(default=50, minimum=1)
    """Draw among so many of the likeliest tokens; null: among all."""
    top_p: float = key(default=1.0, exclusiveMinimum=0, maximum=1)
    """Draw among the likeliest tokens that together have this probability."""
    seed: int = key(default=0, minimum=0, maximum=2**63 - 1)
    """The same draws each time."""


SCORED = ("tasks", "hellaswag")


class Evaluation(Section):
    """training.eval_steps says how often, this section on what."""

    max_validation_tokens: int | None = key(default=None, minimum=1)
    """A fixed part of the validation tokens; null: all of them."""
    prompt: str | list[str] = key(
        default="", schema={"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}
    )
    """What the samples continue: a text, or a list of texts."""
    sample_tokens: int = key(default=128, minimum=0)
    """Length of a sample; 0: no samples."""
    sample_steps: int | None = key(default=None, only_with=("sample_tokens",), minimum=1)
    """Write samples every so many steps, with a validation or without; null: after each validation."""
    sampling: Sampling = key(default_factory=Sampling, only_with=("sample_tokens",))
    hellaswag: str | None = key(default=None, minLength=1)
    """HellaSwag's validation set: a .jsonl file, or a dataset on the hub as Rowan/hellaswag; scored with the
    validations as hellaswag/acc and hellaswag/acc_norm. null: not."""
    tasks: list[str] = key(default=[], items={"minLength": 1})
    """Tasks, tags or groups of lm-eval, YAML files of tasks, or folders of them; sets: dclm_core, olmes, or a JSON file
    of one; scored with the validations. Needs requirements-eval.txt."""
    task_steps: int | None = key(default=None, only_with=SCORED, minimum=1)
    """Score hellaswag and tasks at the validations whose step is a multiple of this, and at the last; null: at each."""
    task_limit: int | None = key(default=None, only_with=SCORED, minimum=1)
    """Only the first so many items of each; null: all."""
    metric: str = key(default="loss", minLength=1)
    """What patience and checkpoints.keep_best judge a validation by, with or without eval/ before it: loss,
    bits_per_byte, <source>_loss, hellaswag/acc_norm, <task>/<metric>. Losses, perplexities and bits per byte are better
    when lower."""
    patience: int | None = key(default=None, minimum=1)
    """Stop after so many validations in a row that are not better than the best before them; null: train to the end of
    the budget."""
    min_improvement: float = key(default=0.0, only_with=("patience",), minimum=0)
    """With patience: better by no more than this does not count."""

    def __post_init__(self) -> None:
        # Named as the logs name it, or without their group.
        object.__setattr__(self, "metric", self.metric.removeprefix("eval/"))


class Report(Section):
    """runs/<name>/report.html, the page that shows how the run goes."""

    every_seconds: float | None = key(default=30, minimum=0.1, maximum=86400)
    """Write it at most this often while training, by a process of its own; null: not at all."""
    target_loss: float | None = key(default=None, exclusiveMinimum=0)
    """Validation loss in nats per token that the run should reach; the report compares with it."""
    dollars_per_gpu_hour: float | None = key(default=None, exclusiveMinimum=0)
    """Dollars an hour of a GPU, for the plan and the cost of the run so far and at its end; null: a listed price."""
    ladder: str | None = key(default=None, minLength=1)
    """Folder of a ladder of small runs (docs/ladder.md), a path from the repository: the plan and the report say which
    loss it foresees."""


CURVES = RECIPES / "published" / "curves"


class Published(Section):
    """The run that others made known and this recipe repeats; nothing here changes what is trained."""

    run: str | None = key(default=None, omitted=True, minLength=1)
    """Who ran it, and when."""
    result: str | None = key(default=None, omitted=True, minLength=1)
    """What it reached, and after how many tokens."""
    exact: list[str] | None = key(default=None, omitted=True)
    """What is as it was published."""
    differs: list[str] | None = key(default=None, omitted=True)
    """What is not, and how this recipe has it."""
    unknown: list[str] | None = key(default=None, omitted=True)
    """What is not published, and what this recipe takes."""
    sources: list[str] | None = key(default=None, omitted=True)
    """Public addresses of all of it."""
    curve: str | None = key(default=None, omitted=True, minLength=1)
    """Its curve, which the report draws beneath the run's own: a name from recipes/published/curves/, or the path of
    such a file."""

    def check_together(self, at: str) -> Wrong:
        """The curve is there."""
        if self.curve is not None and not curve_file(self.curve).is_file():
            known = ", ".join(sorted(path.stem for path in CURVES.glob("*.json")))
            yield f"{at}.curve", f"is {self.curve!r}: no such file; known are {known}, or the path of one"


def curve_file(name: str) -> Path:
    """Return the path of a published curve, by its name or path."""
    return Path(name) if name.endswith(".json") else CURVES / f"{name}.json"
