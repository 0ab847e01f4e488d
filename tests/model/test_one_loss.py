"""Promise: honest numbers. One set of weights has one loss and one score, whoever measures it, and however."""

import json
import shutil
import sys
from importlib.util import find_spec
from itertools import chain, product

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from pretraining.checkpoints.export import write_model_folder
from pretraining.data.prepared import open_prepared
from pretraining.evaluation.__main__ import main
from pretraining.evaluation.scores import Harness, Passes, scores_of
from pretraining.evaluation.validation import IGNORED, Evaluator
from pretraining.model.build import build_from_recipe
from pretraining.recipe import load_recipe
from tests.data.test_data_prep import make_texts, write_jsonl
from tests.evaluation.test_scores import found_by_lm_eval
from tests.gear.runs import MODELS, SMALL_RECIPE, Run, completed, section_of
from tests.gear.scored_tasks import write_items, write_tasks

PART = "evaluation.max_validation_tokens=640"
TOKENS_AND_PLACES = {"input_ids", "position_ids"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Short documents, of which a block of 64 tokens holds several, prepared from one source and from two."""
    root = tmp_path_factory.mktemp("one-loss")
    sources = [
        {"path": str(write_jsonl(root / f"{name}.jsonl", make_texts(400, seed, 12))), "name": name}
        for seed, name in enumerate(("web", "code"))
    ]
    write_items(root / "items.jsonl")
    weighted = [{**source, "weight": weight} for source, weight in zip(sources, (3, 1), strict=True)]
    letters = {"path": str(write_jsonl(root / "letters.jsonl", make_texts(40, 2, 12))), "name": "letters"}
    for name, used in (("one", sources[:1]), ("two", sources), ("own", weighted)):
        data = {**SMALL_RECIPE["data"], "name": name, "sources": used, "validation_share": 0.2}
        data |= {"validation": {"sources": [letters]}} if name == "own" else {}
        (root / f"{name}.json").write_text(json.dumps({**SMALL_RECIPE, "data": data}))
        where = ("--recipe", root / f"{name}.json", "--data_dir", root / "data")
        completed([sys.executable, "data_prep.py", *where])
    return root


class SmallRun:
    """A run folder with untrained weights: its recipe, what its validation says, and its export."""

    def __init__(self, root, folder, data: str, settings: tuple[str, ...]):
        self.root, self.folder = root, folder
        settings = [f"evaluation.hellaswag={root / 'items.jsonl'}", *settings]
        self.recipe = load_recipe(str(root / f"{data}.json"), settings)
        folder.mkdir(exist_ok=True)
        (folder / "recipe.json").write_text(json.dumps(self.recipe.to_dict()))
        self.data = open_prepared(self.recipe, root / "data")
        tokenizer = AutoTokenizer.from_pretrained(self.data.tokenizer_path)
        arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, seed=7)
        self.model = build_from_recipe(self.recipe, tokenizer, arguments, draw_weights=True)
        self.evaluator = Evaluator(self.recipe, self.data, tokenizer, 10)
        write_model_folder(self.model, self.model.state_dict(), tokenizer, folder / "export", "card")

    def in_the_loop(self) -> dict:
        return self.evaluator.measure(self.model, 10, lambda: False)

    def by_the_command(self, capsys, folder=None) -> dict:
        """What `python -m pretraining.evaluation RUN` says, of the loss and of HellaSwag; RUN may be another folder."""
        items, found = str(self.root / "items.jsonl"), {}
        for asked in (("--data_dir", str(self.root / "data"), "--no-sample"), ("--hellaswag", items)):
            capsys.readouterr()
            main([str(folder or self.folder), "--json", *asked])
            found |= json.loads(capsys.readouterr().out)
        return found

    @torch.no_grad()
    def by_plain_transformers(self, **settings) -> float:
        """Nats per token: `from_pretrained`, and a forward pass a block with nothing but its tokens and positions."""
        model, nats, tokens = AutoModelForCausalLM.from_pretrained(self.folder / "export", **settings), 0.0, 0
        for part in self.evaluator.validation.parts:
            if part.beside:
                continue
            for block in part.dataset.__getitems__(list(range(len(part.dataset)))):
                labels = torch.tensor(block["labels"])
                given = {key: torch.tensor(block[key])[None] for key in block.keys() & TOKENS_AND_PLACES}
                logs = torch.log_softmax(model(**given).logits[0].double(), -1)
                kept = labels != IGNORED
                nats -= logs[kept, labels[kept]].sum().item()
                tokens += kept.sum().item()
        return nats / tokens

    def by_lm_eval(self) -> dict[str, float]:
        """Every loss, in nats per token: lm-eval's own class of models reads the export, text by text."""
        from lm_eval.models.huggingface import HFLM

        exported = AutoModelForCausalLM.from_pretrained(self.folder / "export")
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "export")
        reader, sums = HFLM(pretrained=exported, tokenizer=tokenizer, batch_size=8, max_length=64), {}
        parts = self.evaluator.validation.parts
        for part in parts:
            blocks = part.dataset.__getitems__(list(range(len(part.dataset))))
            texts = [(("", ""), *text) for block in blocks for text in texts_of(block)]
            nats = -sum(found[0] for found in reader._loglikelihood_tokens(texts, disable_tqdm=True))
            sums[part.name] = nats, sum(len(targets) for *_, targets in texts)
        losses = {f"{name}_loss": nats / tokens for name, (nats, tokens) in sums.items() if len(parts) > 1}
        nats, tokens = map(sum, zip(*(sums[part.name] for part in parts if not part.beside), strict=True))
        return {**losses, "loss": nats / tokens}

    def assert_one_loss(self, capsys, kernels: tuple[str, ...]) -> set[str]:
        """Every metric of the loop, by the command; and the loss by the export alone, whatever kernel it loads with.

        Return the names of the metrics.
        """
        loop, found = self.in_the_loop(), self.by_the_command(capsys)
        assert {key: found[key] for key in loop} == pytest.approx(loop, rel=1e-5, abs=1e-5)
        for kernel in kernels:
            plain = self.by_plain_transformers(attn_implementation=kernel)
            assert plain == pytest.approx(loop["loss"], abs=1e-5)
        if find_spec("lm_eval"):
            losses = {key: loop[key] for key in loop if key.endswith("loss") and key != "mixture_loss"}
            assert self.by_lm_eval() == pytest.approx(losses, abs=1e-5)
        return loop.keys()


def test_a_block_has_as_many_targets_as_inputs_and_validation_blocks_do_not_cross_sources(root):
    """The numbers of docs/data.md: N + 1 tokens a block, (T - 1) // N blocks, each source's validation by itself."""
    recipe = load_recipe(str(root / "two.json"), ["evaluation.max_validation_tokens=null"])
    data, length = open_prepared(recipe, root / "data"), recipe.sequence_length
    shards = data.validation.shard_entries
    stream = data.validation.read(0, data.validation.num_tokens)
    parts = Evaluator(recipe, data, data.tokenizer, 10).validation.parts
    assert [part.name for part in parts] == ["web", "code"]
    start = 0
    for source, part in enumerate(parts):
        tokens = sum(shard["tokens"] for shard in shards if shard["source"] == source)
        own, start = stream[start : start + tokens], start + tokens
        assert len(part.dataset) == (tokens - 1) // length > 1
        for number, block in enumerate(part.dataset.__getitems__(list(range(len(part.dataset))))):
            read = own[number * length : number * length + length + 1]
            assert len(read) == length + 1
            assert (block["input_ids"] == read[:-1]).all() and (block["labels"] == read[1:]).all()
    assert start == len(stream)


def texts_of(block: dict) -> list[tuple[list[int], list[int]]]:
    """The texts of a block, (first token, all others), as a reader who knows nothing of blocks gets them.

    If documents are kept apart, a text begins where positions begin anew, and its last token predicts nothing.
    """
    ids, labels = block["input_ids"].tolist(), block["labels"].tolist()
    positions = block.get("position_ids", np.arange(len(ids))).tolist()
    starts = [place for place, position in enumerate(positions) if position == 0]
    pieces = [range(*ends) for ends in zip(starts, [*starts[1:], len(ids)], strict=True)]
    texts = [
        ([ids[piece[0]]], [labels[place] for place in piece if labels[place] != IGNORED]) for piece in pieces
    ]
    return [text for text in texts if text[1]]


class TrainedRun(SmallRun):
    """Two ranks of train.py under ZeRO-2: what the run wrote into its own rows."""

    def __init__(self, root, folder, data: str, settings: tuple[str, ...]):
        self.root, self.folder, recipe = root, folder, root / f"{data}.json"
        settings = (f"evaluation.hellaswag={root / 'items.jsonl'}", *settings)
        words = ["--recipe", recipe, "--data_dir", root / "data", "--output_dir", folder]
        words += [word for setting in settings for word in ("--set", setting)]
        completed(["forked", "2", "train.py", *words])
        self.recipe = load_recipe(str(folder / "recipe.json"))
        self.data = open_prepared(self.recipe, root / "data")
        self.evaluator = Evaluator(self.recipe, self.data, self.data.tokenizer, 10)

    def in_the_loop(self) -> dict:
        row = Run(self.folder).validation_rows[-1]
        return {key.removeprefix("eval/"): row[key] for key in row if key.startswith("eval/")}


def settings_of(model: str, *settings: str) -> tuple[str, ...]:
    """A run's settings, with the model section of that name."""
    return (section_of(MODELS[model]), *settings)


CHOICES = {
    "masks": {"unmasked": ("data.document_masking=false",), "masked": ("data.document_masking=true",)},
    "packing": {"in_sequence": (), "best_fit": ("data.packing=best_fit",)},
    "part": {"whole": (), "part": (PART,)},
    "data": {"one": ("one",), "two": ("two",)},
}
GPT2 = [("gpt2", *choice) for choice in product(*CHOICES.values())]
OTHERS = [
    (name, masks, "best_fit", "part", "two") for name in ("llama", "qwen3_moe") for masks in CHOICES["masks"]
]
OWN = [("gpt2", "masked", "best_fit", "part", "own"), ("llama", "unmasked", "in_sequence", "whole", "own")]


@pytest.mark.parametrize("choice", [*GPT2, *OTHERS, *OWN], ids="-".join)
def test_loop_command_and_plain_transformers_find_one_loss(root, tmp_path, capsys, choice):
    """Of every model and every way to pack, to mask and to cut a validation short."""
    model, *names, data = choice
    settings = [CHOICES[key][name] for key, name in zip(CHOICES, names, strict=False)]
    run = SmallRun(root, tmp_path / "run", data, settings_of(model, *chain.from_iterable(settings)))
    metrics = run.assert_one_loss(capsys, ("sdpa", "eager"))
    assert (data != "one") == ("web_loss" in metrics) and "hellaswag/acc" in metrics
    assert (data == "own") == ({"letters_loss", "mixture_loss"} <= metrics)


def test_a_trained_run_has_one_loss_too(root, tmp_path, capsys):
    """All at once: documents kept apart, best-fit packing, a part of weighted sources and one beside them."""
    settings = ["data.document_masking=true", "data.packing=best_fit", PART, "budget.tokens=2048"]
    settings += ["training.eval_steps=4", "checkpoints.background=false", "monitors.noise_scale_steps=null"]
    run = TrainedRun(root, tmp_path / "run", "own", tuple(settings))
    metrics = run.assert_one_loss(capsys, ("sdpa",))
    assert {"loss", "web_loss", "code_loss", "letters_loss", "hellaswag/acc"} <= metrics


@pytest.fixture(scope="module")
def masked(root, tmp_path_factory):
    """Document masking, a part of two sources, a mixture of experts."""
    settings = settings_of("qwen3_moe", "data.document_masking=true", PART)
    return SmallRun(root, tmp_path_factory.mktemp("masked"), "two", settings)


def test_an_export_that_fills_a_cache_has_the_loss_too(masked, tmp_path, capsys):
    """Exports of before, and what others wrote: their configs do not change what the command finds."""
    loop, folder = masked.in_the_loop(), shutil.copytree(masked.folder, tmp_path / "run")
    path = folder / "export" / "config.json"
    changed = {**json.loads(path.read_text()), "use_cache": True, "output_router_logits": True}
    path.write_text(json.dumps(changed))
    found = masked.by_the_command(capsys, folder)
    assert {key: found[key] for key in loop} == pytest.approx(loop, rel=1e-5, abs=1e-5)


@torch.no_grad()
def test_the_loss_that_an_export_gives_with_labels_is_that_of_its_tokens(masked):
    """Of a mixture of experts too: what training adds for the balance of the router is no part of it."""
    model = AutoModelForCausalLM.from_pretrained(masked.folder / "export")
    ids = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    tokens_alone = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, tokens_alone)


@pytest.mark.parametrize("model", MODELS)
def test_exports_generate_with_a_cache(root, tmp_path, model):
    """After the prompt each token is a forward pass of one; the tokens are those of whole passes."""
    run = SmallRun(root, tmp_path / "run", "one", settings_of(model))
    export = run.folder / "export"
    assert json.loads((export / "generation_config.json").read_text())["use_cache"] is True
    exported, lengths = AutoModelForCausalLM.from_pretrained(export), []
    embeddings = exported.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, given, __: lengths.append(given[0].shape[-1]))
    prompt = torch.randint(3, 512, (1, 9), generator=torch.Generator().manual_seed(1))
    greedy = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    greedy["attention_mask"] = torch.ones_like(prompt)
    cached = exported.generate(prompt, **greedy)
    assert lengths == [9, *[1] * 19] and cached.shape == (1, 29)
    assert torch.equal(cached, exported.generate(prompt, **greedy, use_cache=False))


def test_scores_of_the_harness_are_those_of_lm_eval_and_of_the_loop(masked, tmp_path, capsys):
    """Documents kept apart in training change nothing for texts that are read one by one."""
    folder = write_tasks(tmp_path / "tasks", masked.root / "items.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(masked.folder / "export")
    passes = Passes(64, masked.evaluator.validation.batch_size)
    exported = AutoModelForCausalLM.from_pretrained(masked.folder / "export")
    theirs = scores_of(found_by_lm_eval(exported, tokenizer, folder)["results"])
    assert Harness([str(folder)], tokenizer, passes).measure(masked.model) == pytest.approx(theirs, abs=1e-5)
    capsys.readouterr()
    main([str(masked.folder), "--json", "--tasks", str(folder)])
    assert json.loads(capsys.readouterr().out) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("masks", CHOICES["masks"])
def test_the_unigram_entropy_is_that_of_the_measured_tokens(root, tmp_path, capsys, masks):
    """Counted anew: the targets of the part that is measured, over the bytes behind them."""
    run = SmallRun(root, tmp_path / "run", "two", settings_of("gpt2", PART, *CHOICES["masks"][masks]))
    parts = run.evaluator.validation.parts
    blocks = [each for part in parts for each in part.dataset.__getitems__(range(len(part.dataset)))]
    labels = np.concatenate([block["labels"] for block in blocks])
    counts = np.unique(labels[labels != IGNORED], return_counts=True)[1]
    bits = -(counts * np.log2(counts / counts.sum())).sum() / sum(part.num_bytes for part in parts)
    assert run.by_the_command(capsys)["unigram_bits_per_byte"] == pytest.approx(bits, rel=1e-9)
    whole = run.data.manifest["splits"]["validation"]["unigram_bits_per_byte"]
    assert abs(bits - whole) > 0.01 * whole


def test_the_command_says_its_answer_and_nothing_else(masked):
    """Nothing of what the libraries tell on the way: no kernels that could not be loaded, no progress."""
    words = [masked.folder, "--data_dir", masked.root / "data", "--prompt", "web"]
    finished = completed([sys.executable, "-m", "pretraining.evaluation", *words])
    assert finished.stderr == ""
    lines = finished.stdout.splitlines()
    assert lines[0].startswith("validation loss") and "of the same tokens" in lines[2]
    # after the losses of the sources
    assert finished.stdout.partition("\n\n")[2].startswith("web")
