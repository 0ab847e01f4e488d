"""Random recipes of legal-looking values, drawn from recipes/schema.json: every outcome must be a run or one line.

`RecipeFuzz` draws `--set` texts from a seed; `plan_outcome` asks the plan, in this process; `training_outcome` starts
three real steps. A traceback, a hang, a second line or any exit code but 0 and 2 is a defect, and so is a recipe that
the plan accepts and `train.py` refuses for a reason that the recipe alone gives.
"""

import json
import random
import re
import signal
import subprocess
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretraining.ds_config import ds_config_names
from pretraining.errors import UserError
from pretraining.planning.screen import as_text, full_plan
from pretraining.recipe import recipe_schema
from pretraining.refusals import load_recipe_and_ds_config
from tests.runs import EXPERTS, LLAMA, Started, Workshop

STEPS = 3
PLAN_SECONDS = 60
"""After which a plan, which takes milliseconds, hangs."""
MODELS = {
    "gpt2": None,
    "llama": LLAMA,
    "qwen3_moe": EXPERTS,
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16},
}
SECTIONS = (
    "training",
    "model",
    "loss",
    "optimizer",
    "mup",
    "speed",
    "monitors",
    "checkpoints",
    "evaluation",
    "data",
    "budget",
    "report",
)
PREPARED = (
    "name",
    "sources",
    "tokenizer",
    "validation_share",
    "validation",
    "prepare",
    "encoder",
    "filters",
    "dedup",
    "decontaminate",
    "skip_undecodable",
)
"""Keys of `data` that ask for another data set: left as they are if a run must start."""
LEFT_OUT = {"checkpoints.upload", "training.trackio_space_id", "training.trackio_bucket_id"}
"""Keys that ask for the network."""
SIZES = re.compile(r"^model\..*(size|heads|head_dim|layers?|experts|positions|embeddings|embd|inner|head)$")
"""Keys whose large values make a model that is only slow: in a run they stay small."""
NEEDS_MORE = re.compile(
    r"needs a GPU|cannot be used here|needs the package|failed to import|is not installed|pip install|Ampere|"
    r"requires the .* package|"
    r"cannot be reached|cannot be read|cannot be loaded|no such file|--force|knows no task|holds no task"
)
"""Refusals that depend on this machine, its packages and its files, which the plan does not look at."""


@dataclass(frozen=True)
class Outcome:
    """What became of one recipe: "ran", "refused" with its line, or "defect" with what was seen."""

    kind: str
    said: str = ""


class RecipeFuzz:
    """Recipes over a workshop's small one, drawn from a seed."""

    def __init__(self, seed: int, trains: bool):
        self.random, self.trains = random.Random(seed), trains
        self.schema = recipe_schema()

    def draw(self) -> list[str]:
        """The `--set` texts of one recipe: a family, a ds_config, and one to four random values."""
        family = self.random.choice(list(MODELS))
        settings = [f"budget.tokens={STEPS * 512}"]
        if MODELS[family]:
            settings.append(f"model={json.dumps(MODELS[family])}")
        keys = list(self._keys(family))
        for _ in range(self.random.choice((1, 1, 2, 2, 3, 4))):
            section = self.random.choice(SECTIONS)
            key, schema = self.random.choice([each for each in keys if each[0].startswith(section + ".")])
            settings.append(f"{key}={json.dumps(self._value(key, schema))}")
        return settings

    def draw_stage(self) -> str:
        """What `--deepspeed` is given."""
        names = [name for name in ds_config_names() if name != "zero3_nvme" or not self.trains]
        return self.random.choice(["null", "null", "zero1", "zero2", "zero3", *names])

    def _keys(self, family: str) -> Iterator[tuple[str, dict]]:
        for section in SECTIONS:
            found = self.schema["$defs"][family] if section == "model" else self.schema["properties"][section]
            for key, schema in found["properties"].items():
                dotted = f"{section}.{key}"
                if key == "model_type" or dotted in LEFT_OUT:
                    continue
                if self.trains and (dotted == "budget.tokens" or (section == "data" and key in PREPARED)):
                    continue
                if "properties" in schema and self.random.random() < 0.8:
                    yield from ((f"{dotted}.{name}", each) for name, each in schema["properties"].items())
                else:
                    yield dotted, schema

    def _value(self, key: str, schema: dict):
        """A value of the schema's type: limits, defaults, and what a user might try."""
        if "anyOf" in schema:
            schema = self.random.choice(schema["anyOf"])
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
            return self.random.choice(
                TEXTS.get(key.rpartition(".")[2], ["", "x", "loss", "auto", "sdpa", "1"])
            )
        if kind == "array":
            items = schema.get("items", {"type": "string"})
            return [self._value(key, items) for _ in range(self.random.choice((0, 1, 2, 3)))]
        return self._object(key, schema)

    def _number(self, key: str, schema: dict, kind: str):
        small = [-1, 0, 1, 2, 3, 4, 8, 16, 64, 100, 512]
        if kind == "number":
            small += [-0.5, 1e-8, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.5, 1e6]
        else:
            small += [] if self.trains and SIZES.search(key) else [65536, 2**31, 2**63, 10**18]
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
        names = list(schema.get("properties", {}))
        chosen = self.random.sample(names, min(len(names), self.random.choice((0, 1, 2))))
        return {name: self._value(f"{key}.{name}", schema["properties"][name]) for name in chosen}


TEXTS = {
    "attn_implementation": [
        "sdpa",
        "eager",
        "flex_attention",
        "flash_attention_2",
        "flash_atention_2",
        "sdpa_causal",
        "",
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
}


def plan_outcome(workshop: Workshop, settings: list[str], stage: str, world_size: int) -> Outcome:
    """What the plan says of a recipe, asked in this process."""
    try:
        signal.signal(signal.SIGALRM, _too_late)
        signal.alarm(PLAN_SECONDS)
        recipe, ds_config = load_recipe_and_ds_config(str(workshop.recipe), [*settings], stage, world_size)
        answer = full_plan(recipe, ds_config, world_size, None)
        json.dumps(answer, allow_nan=False)
        as_text(answer)
    except UserError as error:
        return _refused(f"error: {error}\n")
    except Exception:
        return Outcome("defect", traceback.format_exc())
    finally:
        signal.alarm(0)
    return Outcome("ran")


def _too_late(*_) -> None:
    raise TimeoutError(f"no plan after {PLAN_SECONDS} s")


def training_outcome(
    workshop: Workshop, settings: list[str], stage: str, ranks: int, output: Path, timeout: float = 120
) -> Outcome:
    """What three real steps on `ranks` ranks (0: a plain process) come to."""
    words = [
        "forked",
        str(ranks),
        "train.py",
        *workshop.options("--output_dir", output, "--deepspeed", stage),
    ]
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
