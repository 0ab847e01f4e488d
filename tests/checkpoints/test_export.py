"""The export loads anywhere, holds the same model from every stage, and its numbers can be checked."""

import json
import math

import datasets
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerState

from pretraining.evaluation.sampling import SamplingCallback, sample_text
from pretraining.recipe import load_recipe
from pretraining.recipe.sections import Sampling
from pretraining.runtime.durable_files import read_rows
from pretraining.runtime.run_folder import RunFolder
from tests.gear.runs import MODELS, SMALL_RECIPE, STEPS, completed
from tests.training.test_curve import BALANCED, IN_BF16, STAGES, stage_run

LENGTH = SMALL_RECIPE["model"]["n_positions"]


@pytest.fixture(params=STAGES)
def run(workshop, request):
    return stage_run(workshop, request.param)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(512, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def loaded(run):
    return AutoModelForCausalLM.from_pretrained(run.dir.export).eval()


@torch.no_grad()
def test_every_stage_exports_the_same_model(workshop, run, tokens):
    """`from_pretrained` alone, in fp32: the logits of a plain process within 1e-4."""
    difference = loaded(run)(tokens).logits - loaded(workshop.plain())(tokens).logits
    assert difference.abs().max() < 1e-4


def test_tied_weights_are_stored_once(run):
    """One safetensors file, no lm_head beside the embedding it is."""
    assert sorted(path.name for path in run.dir.export.glob("*.safetensors")) == ["model.safetensors"]
    with safe_open(run.dir.export / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(list(loaded(run).parameters()))


def test_a_bf16_run_exports_bf16_weights(workshop):
    """`dtype` says what is stored."""
    for stage in ("zero2", "zero3"):
        run = workshop.run(stage, settings=IN_BF16)
        weights = load_file(run.dir.export / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        assert json.loads((run.dir.export / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_tokenizer_comes_along(workshop):
    """AutoTokenizer of the export encodes as the data was encoded, and can generate at once."""
    export = workshop.run("zero2", by="deepspeed").dir.export
    text = "def f(x):\n    return x + 1\n"
    folders = workshop.data / "corpus/tokenizer", export
    prepared, exported = map(AutoTokenizer.from_pretrained, folders)
    assert exported(text)["input_ids"] == prepared(text)["input_ids"]
    assert exported.decode(exported(text)["input_ids"]) == text
    config = json.loads((export / "config.json").read_text())
    assert config["eos_token_id"] == exported.eos_token_id


def test_the_model_card_says_what_it_is(run):
    """The recipe (as it was resolved), the data, the final losses, the versions."""
    card = (run.dir.export / "README.md").read_text()
    recipe = json.loads(card.partition("```json\n")[2].partition("```")[0])
    assert recipe == json.loads(run.dir.recipe.read_text())
    environment = json.loads(run.dir.environment.read_text())
    for package in ("torch", "transformers", "deepspeed"):
        assert f"{package} {environment['versions'][package]}" in card
    assert f"{run.validation_rows[-1]['eval/loss']:.4f}" in card
    assert f"`{recipe['data']['name']}`" in card and "training tokens" in card


def test_the_recipe_of_the_run_folder_repeats_the_run(run):
    """Strictly read, it is the recipe that made it."""
    recipe = load_recipe(str(run.dir.recipe))
    assert recipe.to_dict() == json.loads(run.dir.recipe.read_text())
    assert recipe.deepspeed == ("null" if run.events[0]["zero_stage"] is None else recipe.deepspeed)


def spelled_bytes(tokenizer) -> dict[int, int]:
    """{token: UTF-8 bytes it spells}; byte-level tokens have one character a byte, specials none."""
    special = set(tokenizer.all_special_ids)
    return {id: 0 if id in special else len(word) for word, id in tokenizer.get_vocab().items()}


@torch.no_grad()
def independent_validation(workshop, run) -> tuple[float, float]:
    """(nats per token, bits per byte) by a plain loop over the public formats: load_from_disk and the export."""
    rows = datasets.load_from_disk(str(workshop.data / "corpus"))["validation"]
    stream = np.concatenate([row["input_ids"] for row in rows])
    num_bytes = spelled_bytes(AutoTokenizer.from_pretrained(run.dir.export))
    model, nats, count, spelled = loaded(run), 0.0, 0, 0
    for start in range(0, len(stream) - LENGTH, LENGTH):
        block = torch.tensor(stream[start : start + LENGTH + 1].astype(np.int64))
        logs = torch.log_softmax(model(block[None, :-1]).logits[0].double(), -1)
        nats -= logs[torch.arange(LENGTH), block[1:]].sum().item()
        count += LENGTH
        spelled += sum(num_bytes[int(token)] for token in block[1:])
    return nats / count, nats / math.log(2) / spelled


def test_validation_numbers_are_right(workshop):
    """Promise: honest numbers. Loss, perplexity and bits per byte against an independent computation."""
    run = workshop.run("zero2", by="deepspeed")
    row = run.validation_rows[-1]
    loss, bits_per_byte = independent_validation(workshop, run)
    assert row["eval/loss"] == pytest.approx(loss, abs=1e-5)
    assert row["eval/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    # The bytes of the one document that the last block cuts are counted by its share of tokens.
    assert row["eval/bits_per_byte"] == pytest.approx(bits_per_byte, rel=2e-3)


def evaluated(workshop, run, *words) -> dict:
    """What `python -m pretraining.evaluation RUN --json` says."""
    command = ["forked", "0", "-m", "pretraining.evaluation", run.folder, "--data_dir", workshop.data]
    finished = completed([*command, "--json", *words])
    return json.loads(finished.stdout)


EVALUATED = [("zero3", ()), (None, IN_BF16), ("zero0", IN_BF16), ("zero2", IN_BF16)]
EVALUATED += [("zero2", (f"model={json.dumps(BALANCED)}",))]


@pytest.mark.parametrize(("stage", "settings"), EVALUATED)
def test_the_evaluation_command_repeats_the_numbers(workshop, stage, settings):
    """`python -m pretraining.evaluation RUN --json`: the run's last validation, and text from the prompt.

    Weights kept in fp32 are multiplied in bf16, as by the run; weights in bf16 are taken as they are. Of a mixture of
    experts it is the cross-entropy alone: neither counts the balance of the router.
    """
    run = workshop.run(stage, settings=settings) if stage else workshop.plain(settings)
    words = ["--no-sample"] if settings else ["--prompt", "class A"]
    found, end = evaluated(workshop, run, *words), run.events[-1]
    for name in ("loss", "bits_per_byte"):
        assert found[name] == pytest.approx(end[f"eval_{name}"], abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-6)
    assert found["unigram_bits_per_byte"] == end["unigram_bits_per_byte"]
    assert settings or (found["sample"].startswith("class A") and len(found["sample"]) > len("class A"))


def test_the_last_sample_of_a_run_is_that_of_its_export(workshop):
    """The live model under ZeRO-3 writes what the exported one writes, drawn with the same seed."""
    run = workshop.run("zero3")
    last = run.samples[-1]
    tokenizer = AutoTokenizer.from_pretrained(run.dir.export)
    assert last["step"] == STEPS
    num_tokens = SMALL_RECIPE["evaluation"]["sample_tokens"]
    assert last["text"] == sample_text(loaded(run), tokenizer, last["prompt"], num_tokens)


@pytest.mark.parametrize("name", MODELS)
def test_a_sample_leaves_no_trace(workshop, name):
    """Random generators, training mode and config are as they were, so that the curve does not see it."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name])).train()
    tokenizer = AutoTokenizer.from_pretrained(workshop.data / "corpus/tokenizer")
    config, state = model.config.to_dict(), torch.random.get_rng_state()
    texts = [sample_text(model, tokenizer, "def ", 8) for _ in range(2)]
    assert texts[0] == texts[1] != "def "
    drawn = [
        sample_text(model, tokenizer, "def ", 8, Sampling(**settings))
        for settings in ({"seed": 1}, {"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6}, {"top_k": None})
    ]
    # one token to draw from is the likeliest one
    assert texts[0] != drawn[0] and drawn[1] == drawn[2] == drawn[3] != drawn[4]
    assert model.training and all(module.training for module in model.modules())
    assert model.config.to_dict() == config and torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sample_of_no_finite_logits_is_left_out(workshop, tmp_path, capsys, value, temperature):
    """Of a run after a NaN: no row and one line, and training goes on."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["gpt2"]))
    tokenizer = AutoTokenizer.from_pretrained(workshop.data / "corpus/tokenizer")
    settings = ['evaluation.prompt=["a", "b"]', f"evaluation.sampling.temperature={temperature}"]
    run = RunFolder(tmp_path)
    callback = SamplingCallback(run, load_recipe("features/gpt2", settings), tokenizer)
    step = {"args": None, "state": TrainerState(global_step=5, is_world_process_zero=True), "control": None}
    callback.on_evaluate(**step, model=model)
    assert len(read_rows(run.samples)) == 2
    model.lm_head.weight.data[0] = value
    callback.on_evaluate(**step, model=model)
    assert len(read_rows(run.samples)) == 2
    assert capsys.readouterr().err == "step 5: 2 of 2 samples left out: the model's logits are not finite\n"
