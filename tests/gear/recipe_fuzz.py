"""Random recipes of legal-looking values, drawn from recipes/schema.json: every outcome must be a run or one line.

`RecipeFuzz` draws `--set` texts from a seed; `plan_outcome` asks the plan, in this process; `training_outcome` starts
three real steps. A traceback, a hang, a second line or any exit code but 0 and 2 is a defect, and so is a recipe that
the plan accepts and `train.py` refuses for a reason that the recipe alone gives.

`checked_recipes` asks plan, `data_prep.py` and `train.py` in this process for what each checks before it reads a text
or trains a step, over fifteen types of models and all filters: what one of them refuses, the plan refuses alike.
"""

import json
import os
import random
import re
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest import mock

import torch

from pretraining.data.corpus import open_sources
from pretraining.data.packed_dataset import build_training_dataset
from pretraining.data.portions import portions_of
from pretraining.data.preparation.plan import Preparation
from pretraining.data.prepared import open_prepared
from pretraining.ds_config import ds_config_names
from pretraining.errors import UserError
from pretraining.evaluation.validation import Evaluator
from pretraining.extend import load_extensions
from pretraining.model.build import build_from_recipe
from pretraining.model.loss import build_loss
from pretraining.planning.gate import judge_plan
from pretraining.planning.run_plan import Machine, build_run_plan
from pretraining.planning.screen import as_text, full_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import load_recipe, recipe_schema
from pretraining.recipe.model import type_entry
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.training.arguments import build_arguments
from pretraining.training.trainer import PretrainingTrainer, RunParts
from tests.gear.answers_here import answer_here
from tests.gear.runs import EXPERTS, LLAMA, MIXTRAL, QWEN3, Started, Workshop
from tests.gear.small_models import small

STEPS = 3
PLAN_SECONDS = 60
"""After which a plan, which takes milliseconds, hangs."""
MODELS = {"gpt2": None, "llama": LLAMA, "qwen3_moe": EXPERTS, "qwen3": QWEN3}
OTHER_TYPES = "olmo2 smollm3 gemma3_text gpt_oss deepseek_v3 granite glm4_moe phi3 mistral gpt_neox"
FIFTEEN = {**MODELS, "mixtral": MIXTRAL}
for _name in OTHER_TYPES.split():
    FIFTEEN[_name] = small(_name, type_entry(_name), vocab_size=512, max_position_embeddings=64)
SECTIONS = "training model loss optimizer mup speed monitors checkpoints evaluation data budget report"
PREPARED = (
    "name sources tokenizer validation_share validation prepare encoder filters dedup "
    "decontaminate skip_undecodable"
)
"""Keys of `data` that ask for another data set: left as they are if a run must start."""
SLOW = {"evaluation.tasks", "data.sources", "data.validation", "training.report_to"}
"""Keys that ask for packages that take seconds to load, or for the hub."""
LEFT_OUT = {"checkpoints.upload", "training.trackio_space_id", "training.trackio_bucket_id"}
"""Keys that ask for the network."""
SIZES = re.compile(
    r"^model\..*(size|rank|heads|head_dim|layers?|experts|positions|embeddings|embd|inner|head)$"
)
"""Keys whose large values make a model that is only slow: in a run they stay small."""
NEEDS_MORE = re.compile(
    r"needs a GPU|cannot be used here|needs the package|failed to import|is not installed|pip install|Ampere|"
    r"requires the .* package|"
    r"cannot import|import: keyword has no|holds no \.txt|"
    r"which nothing reads with training\.optim|training\.optim_args: .* does not take|"
    r"cannot be reached|cannot be read|cannot be loaded|no such file|--force|knows no task|holds no task"
)
"""Refusals that depend on this machine, its packages and its files, which the plan does not look at."""


@dataclass(frozen=True)
class Outcome:
    """What became of one recipe: "ran", "refused" with its line, or "defect" with what was seen."""

    kind: str
    said: str = ""


class RecipeFuzz:
    """Recipes over a workshop's small one, drawn from a seed.

    trains: whether the workshop's data must do. checks: whether a model must be built, of any of `FIFTEEN`.
    """

    def __init__(self, seed: int, trains: bool, checks: bool = False):
        self.random, self.trains, self.checks = random.Random(seed), trains, checks
        self.models = FIFTEEN if checks else MODELS
        self.schema = recipe_schema()

    def draw(self) -> list[str]:
        """The `--set` texts of one recipe: a family, a ds_config, and one to four random values."""
        family = self.random.choice(list(self.models))
        settings = [f"budget.tokens={STEPS * 512}"]
        if self.models[family]:
            settings.append(f"model={json.dumps(self.models[family])}")
        if self.checks and self.random.random() < 0.3:
            filters = self.schema["properties"]["data"]["properties"]["filters"]
            settings.append(f"data.filters={json.dumps(self._value('data.filters', filters))}")
        keys = list(self._keys(family))
        for _ in range(self.random.choice((1, 1, 2, 2, 3, 4))):
            section = self.random.choice(SECTIONS.split() + ["model"] * 4 * self.checks)
            key, schema = self.random.choice([each for each in keys if each[0].startswith(section + ".")])
            settings.append(f"{key}={json.dumps(self._value(key, schema))}")
        return settings

    def draw_stage(self) -> str:
        """What `--deepspeed` is given."""
        names = [name for name in ds_config_names() if name != "zero3_nvme" or not self.trains]
        return self.random.choice(["null", "null", "zero1", "zero2", "zero3", *names])

    def _keys(self, family: str) -> Iterator[tuple[str, dict]]:
        for section in SECTIONS.split():
            found = self.schema["properties"][section]
            if section == "model":
                found = type_entry(family)
            for key, schema in found["properties"].items():
                dotted = f"{section}.{key}"
                if key == "model_type" or dotted in LEFT_OUT or (self.checks and dotted in SLOW):
                    continue
                asks_for_other_data = section == "data" and key in PREPARED.split()
                if self.trains and (dotted == "budget.tokens" or asks_for_other_data):
                    continue
                if "properties" in schema and self.random.random() < 0.8:
                    yield from ((f"{dotted}.{name}", each) for name, each in schema["properties"].items())
                else:
                    yield dotted, schema

    def _value(self, key: str, schema: dict):
        """A value of the schema's type: limits, defaults, and what a user might try."""
        if "anyOf" in schema:
            schema = self.random.choice(schema["anyOf"])
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        kinds = schema.get("type", "string")
        kind = self.random.choice([kinds] if isinstance(kinds, str) else kinds)
        if kind == "null":
            return None
        if kind == "boolean":
            return self.random.random() < 0.5
        if kind in ("integer", "number"):
            return self._number(key, schema, kind)
        if kind == "string":
            texts = TEXTS.get(key.rpartition(".")[2], ["", "x", "loss", "auto", "sdpa", "1"])
            return self.random.choice(texts)
        if kind == "array":
            items = schema.get("items", {"type": "string"})
            return [self._value(key, items) for _ in range(self.random.choice((0, 1, 2, 3)))]
        return self._object(key, schema)

    def _number(self, key: str, schema: dict, kind: str):
        small = [-1, 0, 1, 2, 3, 4, 8, 16, 64, 100, 512]
        if kind == "number":
            small += [-0.5, 1e-8, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.5, 1e6]
        elif not ((self.trains or self.checks) and SIZES.search(key)):
            small += [65536, 2**31, 2**63, 10**18]
        default = schema.get("default")
        if isinstance(default, int | float):
            small += [default, default * 2]
        if self.random.random() < 0.8:  # mostly within the limits, or else nothing gets past the schema
            low, high = schema.get("minimum", -9e99), schema.get("maximum", 9e99)
            above, below = schema.get("exclusiveMinimum", -9e99), schema.get("exclusiveMaximum", 9e99)
            small = [n for n in small if low <= n <= high and above < n < below] or small
        return self.random.choice(small)

    def _object(self, key: str, schema: dict):
        if given := OBJECTS.get(key.rpartition(".")[2]):
            return self.random.choice(given)
        if rules := schema.get("allOf"):  # of data.filters
            schema = self.random.choice(rules)["then"]
        names = list(schema.get("properties", {}))
        chosen = self.random.sample(names, min(len(names), self.random.choice((0, 1, 2))))
        chosen = [*schema.get("required", ()), *(["rule"] if rules else []), *chosen]
        return {name: self._value(f"{key}.{name}", schema["properties"][name]) for name in chosen}


TEXTS = {
    "attn_implementation": [
        *("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_atention_2", "sdpa_causal", ""),
    ],
    "experts_implementation": ["grouped_mm", "eager", "batched_mm", "deepgemm", "fast"],
    "activation_function": ["gelu", "relu", "gelu_new", "swiglu", "silu"],
    "hidden_act": ["silu", "gelu", "relu", "geglu"],
    "metric": ["loss", "perplexity", "bits_per_byte", "accuracy", "hellaswag/acc", "corpus_loss", "/"],
    "tasks": ["arc_easy", "no_such_task", ""],
    "hellaswag": ["Rowan/hellaswag", "/nowhere/hellaswag.jsonl", ""],
    "optim_args": ["", "alpha=0.9", "betas=0.9", "x", "momentum=0.9"],
    "optim_target_modules": ["all-linear", "attn"],
    "include_num_input_tokens_seen": ["all", "no", "non_padding", "yes"],
    "rope_type": ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "ntk"],
    "debug": ["", "underflow_overflow", "tpu_metrics_debug"],
    "run_name": ["", "a run"],
    "prompt": ["", "def ", "\u00e9\u4e2d\u6587 " * 50, "\x00"],
    "trackio_static_space_id": ["x"],
    "languages": ["en", "de", "eng", ""],
    "words": ["a", "two words", " "],
    "import": ["keyword:iskeyword", "keyword:nothing", "nothing"],
}
OBJECTS = {
    "lr_scheduler_kwargs": [
        {},
        {"min_lr_rate": 0.1},
        {"min_lr": 1e-5},
        {"min_lr": 1e-5, "min_lr_rate": 0.1},
        {"min_lr_ratio": 0.1},
        {"num_decay_steps": 1},
        {"num_decay_steps": 100},
        {"num_decay_steps": 1, "min_lr_rate": 0.1},
        {"num_decay_steps": 1, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
        {"num_decay_steps": 1, "decay_type": "exponential"},
        {"num_cycles": 2},
        {"num_cycles": "2"},
        {"lr_end": 1e-7, "power": 2},
        {"lr_end": 1.0},
        {"timescale": 10},
        {"factor": 0.5, "patience": 1},
        {"nonsense": 1},
    ],
    "activation_checkpointing_kwargs": [
        {},
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"every_n_layers": 2},
        {"every_n_layers": 0},
        {"every_n_layers": 99},
        {"offload": True},
        {"nonsense": 1},
    ],
    "liger_kernel_config": [{}, {"rope": True}, {"nonsense": 1}],
    "weights": [{}, {"corpus": 1}, {"nobody": 1.0}],
    "max_top_ngrams": [{}, {"2": 0.1}, {"two": 0.1}, {"2": 2}],
    "max_duplicate_ngrams": [{"5": 0.1}, {"1": 0.1}, {"5": True}],
}


def plan_outcome(workshop: Workshop, settings: list[str], stage: str, world_size: int) -> Outcome:
    """What the plan says of a recipe, asked in this process."""

    def planned() -> None:
        loaded = load_recipe_and_ds_config(str(workshop.recipe), [*settings], stage, world_size)
        answer = full_plan(Setup(*loaded, world_size), None)
        json.dumps(answer, allow_nan=False)
        as_text(answer)

    return _outcome(planned)


def _outcome(tried: Callable[[], None]) -> Outcome:
    """What a function came to that raises `UserError` for what a recipe may not say."""
    try:
        signal.signal(signal.SIGALRM, _too_late)
        signal.alarm(PLAN_SECONDS)
        # a model of the hub is refused at once, and not after some seconds of trying
        with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            tried()
    except UserError as error:
        return _refused(f"error: {error}\n")
    except Exception:
        return Outcome("defect", traceback.format_exc())
    finally:
        signal.alarm(0)
    return Outcome("ran")


def _too_late(*_) -> None:
    raise TimeoutError(f"no plan after {PLAN_SECONDS} s")


def preparation_outcome(workshop: Workshop, settings: list[str], stage: str) -> Outcome:
    """What `data_prep.py` says before it reads a text, asked in this process."""

    def prepared() -> None:
        recipe, _ = load_recipe_and_ds_config(str(workshop.recipe), [*settings], stage)
        sources = open_sources(recipe.data)
        fingerprints = [source.fingerprint() for source in sources]
        folder = workshop.folder / "nowhere" / recipe.data.name
        preparation = Preparation.of(recipe, sources, folder, fingerprints, portions_of(recipe))
        for planned in preparation.stages:
            assert planned.name and preparation.consulted is not None

    return _outcome(prepared)


def start_outcome(workshop: Workshop, settings: list[str], stage: str) -> Outcome:
    """What `train.py` says before the first step of one process, asked in this one.

    Arguments, data, evaluation, model and loss, optimizer and schedule are the run's, without DeepSpeed's engine and
    with no weights drawn. Settings of `data` that ask for other data are started with the workshop's recipe's.
    """

    def started() -> None:
        recipe, ds_config = load_recipe_and_ds_config(str(workshop.recipe), [*settings], stage, 1)
        plan = build_run_plan(Setup(recipe, ds_config))
        judge_plan(plan, Machine(trains_on_processor=True), force=True)
        load_extensions(recipe.extensions)
        arguments = build_arguments(recipe, None, workshop.folder / "nowhere", plan.accumulation_steps)
        own = load_recipe(str(workshop.recipe))
        of_own = all(getattr(recipe.data, key) == getattr(own.data, key) for key in PREPARED.split())
        read = recipe if of_own else own
        data = open_prepared(read, workshop.data).for_run(read)
        dataset, tokenizer = build_training_dataset(data, read, 0), data.tokenizer
        evaluator = Evaluator(read, data, tokenizer, recipe.num_steps)
        with torch.device("meta"):
            model = build_from_recipe(recipe, tokenizer, arguments, draw_weights=False)
        loss = build_loss(model, recipe.loss)
        model.to_empty(device="cpu")
        given = {"loss": loss, "train_dataset": dataset, "parts": RunParts(evaluator)}
        trainer = PretrainingTrainer(recipe, model, arguments, **given)
        trainer.create_optimizer_and_scheduler(recipe.num_steps)

    # it would hold for all of this process
    ours, theirs = "pretraining.training.arguments", "transformers.trainer"
    for_ever = [mock.patch(f"{module}.enable_full_determinism") for module in (ours, theirs)]
    quiet = redirect_stdout(StringIO()), redirect_stderr(StringIO())
    with for_ever[0], for_ever[1], quiet[0], quiet[1]:
        return _outcome(started)


def checked_recipes(
    workshop: Workshop, number: int, seed: int
) -> Iterator[tuple[list[str], str, Outcome, str]]:
    """Yield settings, ds_config, the plan's outcome, and where preparation or start do not agree with it ("" if so)."""
    fuzz = RecipeFuzz(seed, trains=False, checks=True)
    answer_here()
    with mock.patch.dict(os.environ, PRETRAINING_MODEL_CACHE=str(workshop.folder / "counted")):
        for _ in range(number):
            settings, stage = fuzz.draw(), fuzz.draw_stage()
            planned = plan_outcome(workshop, settings, stage, 1)
            prepared = preparation_outcome(workshop, settings, stage)
            started = start_outcome(workshop, settings, stage)
            yield settings, stage, planned, disagreement(planned, prepared, started)


def disagreement(planned: Outcome, prepared: Outcome, started: Outcome) -> str:
    """What is wrong with three answers to one recipe; "" if nothing is.

    What a preparation cannot know, such as the number of ranks, it passes.
    """
    for name, other in {"plan": planned, "preparation": prepared, "start": started}.items():
        if other.kind == "defect":
            return f"{name}: {other.said}"
        if other.kind == "refused" and planned.said != other.said and not NEEDS_MORE.search(other.said):
            return f"{name}: {other.said}, and the plan: {planned.said or 'nothing'}"
    if planned.kind == "refused" and started.kind == "ran":
        return f"plan: {planned.said}, and the start: nothing"
    return ""


def training_outcome(
    workshop: Workshop, settings: list[str], stage: str, ranks: int, output: Path, timeout: float = 120
) -> Outcome:
    """What three real steps on `ranks` ranks (0: a plain process) come to."""
    options = workshop.options("--output_dir", output, "--deepspeed", stage)
    words = ["forked", str(ranks), "train.py", *options]
    started = Started([*words, *(word for each in settings for word in ("--set", each))])
    try:
        finished = started.finish(timeout)
    except subprocess.TimeoutExpired:
        return Outcome("defect", f"hangs: nothing after {timeout:g} s")
    if "Traceback" in finished.stderr or finished.code not in (0, 2):
        return Outcome("defect", f"exit code {finished.code}\n{finished.output}")
    if finished.code == 0:
        return Outcome("ran")
    lines = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    return _refused("\n".join(lines) + "\n" if lines else finished.stderr)


def _refused(text: str) -> Outcome:
    """One line, or a defect."""
    if text.count("\n") != 1 or not text.startswith("error: "):
        return Outcome("defect", f"not one line:\n{text}")
    return Outcome("refused", text.strip())


def is_looser(planned: Outcome, trained: Outcome) -> bool:
    """Whether the plan accepted what `train.py` refused for a reason that the recipe alone gives."""
    return planned.kind == "ran" and trained.kind == "refused" and not NEEDS_MORE.search(trained.said)
