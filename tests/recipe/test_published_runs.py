"""recipes/published/: runs that others made known. Sizes as published, rates by the authors' formulas, each trains."""

import json
import math
import re
from collections.abc import Callable
from functools import cache

import pytest
from torch import zeros
from torch.nn import Parameter
from torch.optim import SGD
from transformers import get_scheduler

from pretraining.ds_config import load_ds_config
from pretraining.errors import UserError
from pretraining.extend import load_extensions
from pretraining.planning.gpus import find_gpu
from pretraining.planning.screen import as_text, fewest_ranks, full_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import RECIPES, Recipe, load_recipe
from pretraining.recipe.fixed_keys import differs_from_published
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.reporting.published import curve_of
from pretraining.training.schedule import own_schedule
from tests.gear.runs import Run, completed, made_once

FOLDER = RECIPES / "published"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))

PARAMETERS = {  # as published, or added up from the published shape
    "babylm-10m": 125_239_296,
    "cerebras-1.3b": 1_315_723_264,
    "cerebras-111m": 111_050_496,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2-124m-llmc": 124_475_904,
    "gpt2-350m-llmc": 354_871_296,
    "llama-3.1-8b": 8_030_261_248,
    # 15.29B without the two tables
    "moonlight-16b-a3b": 15_960_108_544,
    "modded-nanogpt-adamw": 162_354_816,
    "modded-nanogpt-muon": 162_354_816,
    "nanochat-d20": 560_988_160,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo3-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "pythia-1.4b": 1_414_647_808,
    "pythia-160m": 162_322_944,
    "pythia-70m": 70_426_624,
    "qwen3-0.6b": 596_049_920,
    "smollm2-1.7b": 1_711_376_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm3-3b": 3_075_098_624,
    "tinyllama-1.1b": 1_100_048_384,
}
SAME_SHAPE = r"-mup$|-stage\d$|-\d+k$"
"""What a name adds to that of the recipe of the same shape."""

MACHINES = {  # as the runs had where that is known
    "babylm-10m": (1, "A100-80GB"),
    "cerebras": (8, "H100"),
    "gpt-oss-20b": (64, "H100"),
    "gpt2": (8, "A100-80GB"),
    "llama-3.1-8b": (64, "H100"),
    "moonlight": (256, "H100"),
    "modded-nanogpt": (8, "H100"),
    "nanochat": (8, "H100"),
    "olmo2-1b": (64, "H100"),
    "olmo2-7b": (128, "H100"),
    "olmo3-7b-stage2": (128, "H100"),
    "olmo3-7b-stage3": (64, "H100"),
    "olmo3-7b": (256, "H100"),
    "olmoe": (128, "H100"),
    "pythia-1.4b": (64, "A100-40GB"),
    "pythia": (32, "A100-40GB"),
    "qwen3-0.6b": (8, "H100"),
    "smollm2-135m": (64, "H100"),
    "smollm2-360m": (128, "H100"),
    "smollm2-1.7b": (256, "H100"),
    "smollm3-3b-64k": (48, "H100"),
    "smollm3-3b-32k": (96, "H100"),
    "smollm3-3b": (384, "H100"),
    "tinyllama": (16, "A100-40GB"),
}


@cache
def plan_of(name: str) -> dict:
    recipe = load_recipe(name)
    ranks, gpu = next(machine for prefix, machine in MACHINES.items() if name.startswith(prefix))
    return full_plan(Setup(recipe, load_ds_config(recipe.deepspeed), ranks), find_gpu(gpu))


@pytest.mark.parametrize("name", NAMES)
def test_each_is_planned_without_fault_with_the_published_size_and_result(name):
    plan, published = plan_of(name), load_recipe(name).published
    assert plan["parameters"] == PARAMETERS[re.sub(SAME_SHAPE, "", name)]
    assert not plan["refusals"]
    line = next(line for line in as_text(plan).splitlines() if line.startswith("published"))
    assert "not comparable" not in as_text(plan)
    assert (published.result or "no result").split()[0] in line


@pytest.mark.parametrize("name", NAMES)
def test_each_says_what_is_exact_what_differs_and_where_it_is_from(name, tmp_path):
    """By its name alone, or with the folder's; the same after being written and read again."""
    recipe = load_recipe(name)
    assert recipe.path == FOLDER / f"{name}.json" and recipe.words == ["--recipe", f"published/{name}"]
    assert load_recipe(f"published/{name}").to_dict() == recipe.to_dict()
    published = recipe.published
    assert published.run and published.exact and (published.differs or published.unknown)
    known = r"[\w ':]*((github|huggingface|babylm\.github)\.(com|co|io)|arXiv)"
    assert all(re.match(known, each) for each in published.sources)
    assert 80 < len(recipe.description) < 320
    if published.curve:
        curve = json.loads((FOLDER / "curves" / f"{published.curve}.json").read_text())
        assert curve_of(recipe.to_dict()) == curve and curve["sources"] and curve["licence"]


def test_a_wrong_name_and_a_missing_curve_are_one_line():
    with pytest.raises(UserError, match="did you mean 'gpt2-124m-llmc'"):
        load_recipe("gpt2-124m-llm")
    with pytest.raises(UserError, match=r"published\.curve: is 'none'.*known are .*pythia-160m"):
        load_recipe("features/gpt2", ["published.curve=none"])


OTHER_VOCABULARY = ["data.tokenizer=EleutherAI/gpt-neox-20b", "model.vocab_size=50432"]


@pytest.mark.parametrize(
    ("overrides", "limit", "differs"),
    [
        (["model.n_layer=2"], None, "model.n_layer"),
        (OTHER_VOCABULARY, None, "model.vocab_size, data.tokenizer"),
        ([*OTHER_VOCABULARY, "model.n_layer=2"], None, "model, data.tokenizer"),
        (['data.sources=[{"builtin": "python_stdlib"}]'], None, "data.sources"),
        (["training.per_device_train_batch_size=8", "budget.tokens_per_step=65536"], None, None),
        (["training.seed=1", "training.learning_rate=0.001"], None, None),
        (["model.attn_implementation=eager", "data.name=mine", "data.shuffle_blocks=64"], None, None),
        ([], 5_242_880, None),
    ],
)
def test_a_plan_says_if_a_recipe_that_was_cut_down_is_not_comparable(overrides, limit, differs):
    """Of a batch, a seed, a ds_config or less data it says nothing."""
    recipe = load_recipe("gpt2-124m-llmc", overrides, None if differs else "zero0", limit_tokens=limit)
    words = " ".join(as_text(full_plan(Setup(recipe, load_ds_config(recipe.deepspeed), 1), None)).split())
    reached = f"{recipe.published.result} ({recipe.published.run})"
    reached += f"; not comparable: {differs}" if differs else ""
    assert f"published {reached} without GPUs" in words
    # what a report has: the run's own recipe.json
    assert ", ".join(differs_from_published(json.loads(json.dumps(recipe.to_dict())))) == (differs or "")


def test_a_variant_is_compared_with_the_published_run_that_it_varies_unless_it_is_one_itself(tmp_path):
    """A file with base has its curve and says in what it is another; a later stage has nothing of the first."""
    stage = load_recipe("olmo3-7b-stage3").published
    assert stage.curve is None and stage.result is None and stage.run == "OLMo 3 7B, stage 3"
    variant = {"base": "gpt2-124m-llmc", "description": "x", "model": {"n_layer": 2}}
    own, named = ({"published": {"run": "mine"}}, [], None), ({}, ["model.n_layer"], "gpt2-124m-llmc")
    for more, differs, curve in (own, named):
        (tmp_path / "variant.json").write_text(json.dumps(variant | more))
        recipe = load_recipe(str(tmp_path / "variant.json"))
        assert (differs_from_published(recipe.to_dict()), recipe.published.curve) == (differs, curve)
    # a damaged recipe.json is no reason to have no report
    for damaged in ({"curve": "pythia-70m"}, {"run": [], "curve": 3}, 3):
        assert differs_from_published({"published": damaged}) == []


def test_the_index_names_each():
    """A row for each in recipes/README.md, with its size, result and the GPU-hours that its plan expects."""
    text = (RECIPES / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[`([\w.-]+)`\]\(published/\1\.json\) \| (.*) \|$", text, re.M))
    assert sorted(rows) == NAMES
    for name, row in rows.items():
        size, _, result, paid = row.split(" | ")
        recipe, speed = load_recipe(name), plan_of(name)["forecast"]
        hours = speed["num_gpus"] * speed["expected_seconds"] / 3600
        kind = speed["gpu"].removesuffix("-SXM")
        assert paid == f"{hours:,.{0 if hours >= 9.95 else 1}f} on {speed['num_gpus']} x {kind}"
        assert size == f"{PARAMETERS[re.sub(SAME_SHAPE, '', name)]:,}"
        assert result == (recipe.published.result or "no result published")


def warm(step: int, steps: int) -> float:
    return min(1.0, step / steps)


def cosine(step: float, first: float, last: float, end: float) -> float:
    return end + (1 - end) * (1 + math.cos(math.pi * (step - first) / (last - first))) / 2


def olmo(tokens_per_step: int, warmup: int) -> Callable[[int], float]:
    """OLMo counts the tokens of the step that it takes; the cosine is planned for 5T."""

    def rate(step: int) -> float:
        done, rising = (step + 1) * tokens_per_step, warmup * tokens_per_step
        return done / rising if done < rising else cosine(min(done, 5e12), rising, 5e12, 0.1)

    return rate


def stable(warmup: int, first: int, last: int) -> Callable[[int], float]:
    return lambda step: warm(step, warmup) if step < first else (last - step) / (last - first)


RATES: dict[str, Callable[[int], float]] = {  # share of the peak in the update after `step` updates
    "gpt2-124m-llmc": lambda step: (step + 1) / 700 if step < 700 else cosine(step, 700, 19560, 0),
    "gpt2-350m-llmc": lambda step: (step + 1) / 700 if step < 700 else cosine(step, 700, 60000, 0),
    "modded-nanogpt-adamw": lambda step: min(1, (step + 1) / 250) * min(1, (5625 - step) / (0.7 * 5625)),
    "modded-nanogpt-muon": lambda step: min(1, (3250 - step) / (0.7 * 3250)),
    "nanochat-d20": lambda step: min(1.0, (21400 - step) / 4280),
    "smollm2-135m": stable(2000, 1_600_000, 2_000_000),
    "smollm2-360m": stable(2000, 2_080_000, 2_600_000),
    "smollm2-1.7b": stable(2000, 4_716_000, 5_240_000),
    "smollm3-3b": stable(2000, 4_198_001, 4_720_001),
    "smollm3-3b-32k": lambda step: step / 1000 if step < 1000 else cosine(step, 1000, 20000, 0),
    "smollm3-3b-64k": lambda step: step / 1000 if step < 1000 else cosine(step, 1000, 22000, 0),
    "tinyllama-1.1b": lambda step: (
        (8 * step + 7) / 16000 if 8 * step + 7 < 16000 else cosine(8 * step + 7, 16000, 8 * 1430512, 0.1)
    ),
    **{
        f"pythia-{size}": lambda step: (
            step / 1430
            if step <= 1430
            else max(0.1, (1 + math.cos(math.pi * (min(step, 141570) - 1430) / 143000)) / 2)
        )
        for size in ("70m", "160m", "1.4b")
    },
    "olmo2-1b": olmo(2_097_152, 4000),
    "olmo2-7b": olmo(4_194_304, 2000),
    "olmo3-7b": olmo(4_194_304, 2000),
    "olmoe-1b-7b": olmo(4_194_304, 2500),
    "cerebras-111m": lambda step: warm(step, 1525) - 0.9 * max(0, step - 1525) / 7512,
    "cerebras-111m-mup": lambda step: warm(step, 1525) - 0.9 * max(0, step - 1525) / 7512,
    "cerebras-1.3b": lambda step: step / 346 if step < 346 else cosine(step, 346, 24334, 0.1),
    "cerebras-1.3b-mup": lambda step: step / 346 if step < 346 else cosine(step, 346, 24334, 0.1),
    "babylm-10m": lambda step: warm(step, 5000),
    "olmo3-7b-stage2": lambda step: 1 - step / 47684,
    "olmo3-7b-stage3": lambda step: step / 200 if step < 200 else 1 - (step - 200) / (11921 - 200),
    "moonlight-16b-a3b-stage3": lambda step: step / 100 if step < 100 else 1 - (step - 100) / (14901 - 100),
}
RATES |= {
    name: lambda step, steps=steps: 1 - step / steps
    for name, steps in {"olmo2-1b-stage2": 23852, "olmo2-7b-stage2": 11931}.items()
}


def schedule_of(recipe: Recipe) -> Callable[[float], float]:
    """What the Trainer multiplies the peak with, as `PretrainingTrainer.create_scheduler` builds it."""
    load_extensions(recipe.extensions)
    if (own := own_schedule(recipe, recipe.num_steps)) is not None:
        return own
    training, steps = recipe.training_keywords, recipe.num_steps
    optimizer, lengths = (
        SGD([Parameter(zeros(1))], lr=training.learning_rate),
        (recipe.warmup_steps(steps), steps),
    )
    kind, keywords = training.lr_scheduler_type, training.lr_scheduler_kwargs
    return get_scheduler(kind, optimizer, *lengths, keywords).lr_lambdas[0]


@pytest.mark.parametrize("name", RATES)
def test_rates_are_those_of_the_published_formula(name):
    """At twenty steps: the first, both sides of every bend, the last, and others between."""
    recipe = load_recipe(name)
    ours, theirs, last = schedule_of(recipe), RATES[name], recipe.num_steps
    rising = recipe.warmup_steps(last)
    bends = [0, 1, rising // 2, max(0, rising - 1), rising, rising + 1, last - 2, last - 1]
    steps = sorted({*bends, *(last * k // 20 for k in range(1, 20))})
    peak = recipe.training.learning_rate
    assert len(steps) >= 20
    for step in steps:
        assert peak * ours(step) == pytest.approx(peak * theirs(step), abs=1e-9), step


SMALL = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
SMALL |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL |= {"vocab_size": 384, "max_position_embeddings": 64, "sliding_window": 16, "num_experts": 8}
SMALL |= {"num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 16}
SMALL |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_embd": 64, "n_layer": 2}
SMALL |= {"n_head": 4, "n_positions": 64, "ffn_dim": 96, "word_embed_proj_dim": 64}
QUIET = {"bf16": "false", "dataloader_num_workers": 0, "dataloader_persistent_workers": "false"}
QUIET |= {"logging_steps": 1, "report_to": "none", "save_strategy": "no"}
SIZES = ("gpt2-350m-llmc", "cerebras-1.3b", "cerebras-1.3b-mup", "pythia-70m", "pythia-1.4b", "olmo2-7b")
SIZES += ("smollm2-360m", "smollm2-1.7b")
"""Of families of which another size trains: cut small they are one run, but for the peak of the rate."""
TRAINED = [name for name in NAMES if name not in SIZES and not re.search(r"-stage\d$|-\d+k$", name)]
STEPS = 4


@pytest.fixture(scope="session")
def published_run(shared, workshop):
    """A function that trains a recipe of published/, cut small, for some steps with the real train.py.

    All read one data set, so that it is prepared once.
    """
    data = shared / "published.data"
    text = {"path": str(workshop.folder / "corpus")}
    own = {"name": "published", "sources": [text], "tokenizer": {"train_vocab_size": 320}}
    own |= {"validation": {"sources": [{**text, "name": "same", "max_documents": 2}]}, "validation_share": 0}
    own |= {"mixture": None, "sequence_length": 64, "borders": "eos"}
    on_data = [word for key, value in own.items() for word in ("--set", f"data.{key}={json.dumps(value)}")]

    limit = ["--set", "budget.tokens_per_step=256", "--limit_tokens", str(256 * STEPS)]

    def prepare() -> str:
        command = ["forked", "0", "data_prep.py", "--recipe", NAMES[0], "--data_dir", data]
        return completed([*command, "--executor", "inline", *on_data, *limit]).stdout

    def run(name: str) -> Run:
        made_once(shared / "published.prepared", prepare)
        recipe = load_recipe(name)
        # as many key-value heads as heads where they are the same
        same = recipe.model.get("num_key_value_heads") == recipe.model.get("num_attention_heads")
        small = {**SMALL, "num_key_value_heads": 4} if same else SMALL
        settings = [f"model.{key}={value}" for key, value in small.items() if key in recipe.model]
        # this class has a default beyond the small vocabulary
        settings += ["model.pad_token_id=0"] if recipe.model.model_type == "smollm3" else []
        settings += [f"training.{key}={value}" for key, value in QUIET.items()]
        settings += ["evaluation.sample_tokens=0", "evaluation.max_validation_tokens=256"]
        settings += ["report.every_seconds=null", "budget.ramp=null"]
        settings += ["mup.base_width=32"] if recipe.mup.base_width else []
        words = [*on_data, *(word for text in settings for word in ("--set", text))]
        command = ["forked", "0", "train.py", "--recipe", name, "--deepspeed", "null", "--data_dir", data]
        output = shared / "published" / name
        return Run(output, completed([*command, "--output_dir", output, *words, *limit]))

    return run


@pytest.mark.parametrize("name", TRAINED)
def test_each_trains_with_its_own_groups_and_schedule(name, published_run):
    """Cut by width and depth: its class, optimizer, schedule and losses as they are, and all steps logged."""
    run = published_run(name)
    losses = [row["train/loss"] for row in run.rows if "train/loss" in row]
    assert len(losses) == STEPS and all(map(math.isfinite, losses))
    assert any(row.get("train/learning_rate") for row in run.rows)
    recipe, said = load_recipe(name), (run.folder / "console.log").read_text(encoding="utf-8")
    for row in recipe.optimizer.groups:
        rate, decay = row.learning_rate, row.weight_decay
        assert rate is None or f"learning rate {rate:g}," in said
        assert decay is None or f"weight decay {decay:g}," in said
    assert load_recipe(str(run.dir.recipe)).published == recipe.published


@pytest.mark.parametrize("path", sorted(RECIPES.glob("**/*.json")), ids=lambda path: path.stem)
def test_no_recipe_here_is_refused_by_every_command(path):
    """The layout that it names goes with its model, on the fewest ranks that it may have."""
    if path.name == "schema.json" or path.parent.name in ("stages", "files", "curves"):
        return
    recipe, ds_config = load_recipe_and_ds_config(str(path))
    assert load_recipe_and_ds_config(str(path), world_size=fewest_ranks(ds_config))[0] == recipe
