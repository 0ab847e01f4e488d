"""`python -m pretraining.data stats|inspect|verify|push`: what they say is true, and what is sent is the data set."""

import json
import shutil
import sys
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from pretraining.data.__main__ import main
from pretraining.data.finished import open_finished, verify_data
from pretraining.data.manifest import read_manifest
from pretraining.data.order import GlobalOrder
from pretraining.data.packed_dataset import PackedDataset, build_training_dataset
from pretraining.data.prepared import open_prepared
from pretraining.data.shards import SplitWriter
from pretraining.data.tools.convert import FORMATS, READ_ONLY
from pretraining.data.tools.inspect import Inspection, measure_data
from pretraining.data.tools.push import plan_push
from pretraining.evaluation.sampling import encode, encode_start
from pretraining.recipe import load_recipe
from tests.gear.finished_data import (
    change_manifest,
    documents_of,
    make_texts,
    prepare,
    put_split,
    recipe_file,
    recipe_for,
    refusal,
    write_jsonl,
)
from tests.gear.local_hub import REPOSITORY_ID, LocalHub
from tests.gear.runs import completed, execute

TOOL = [sys.executable, "-m", "pretraining.data"]


@pytest.fixture
def copy(made, tmp_path) -> Path:
    """A copy of the data set that a test may change."""
    return Path(shutil.copytree(made.folder, tmp_path / "corpus"))


def answer(capsys, *words) -> dict | list:
    """What a verb prints with --json."""
    main([*map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


def test_stats_are_those_of_the_documents(made, capsys):
    """Lengths, frequencies and entropy equal a plain count over all documents, and agree with the manifest."""
    measured = answer(capsys, "stats", made.folder, "--top", 3)["splits"]["train"]
    documents = documents_of(made.folder)
    lengths, stream = sorted(map(len, documents)), np.concatenate(documents)
    for share in (0.1, 0.5, 0.99, 1.0):
        nearest_rank = lengths[int(np.ceil(share * len(lengths))) - 1]
        assert measured["document_tokens"][f"p{100 * share:g}"] == nearest_rank
    assert measured["document_tokens"]["mean"] == pytest.approx(np.mean(lengths))
    ids, counts = np.unique(stream, return_counts=True)
    shares = counts / len(stream)
    found = measured["token_frequencies"]
    assert found["unigram_bits_per_token"] == pytest.approx(-(shares * np.log2(shares)).sum())
    assert found["unused_ids"] == 280 - len(ids)
    assert found["eos_share"] == pytest.approx(len(documents) / len(stream))
    assert [token["count"] for token in found["most_frequent"]] == sorted(counts.tolist())[:-4:-1]
    assert min(token["count"] for token in found["rarest"]) == counts.min()
    # The entropy of validation is the one that training compares with; sources add up.
    measured, manifest = measure_data(made.folder), read_manifest(made.folder)
    recorded = manifest["splits"]["validation"]["unigram_bits_per_byte"]
    frequencies = measured["splits"]["validation"]["token_frequencies"]
    assert frequencies["unigram_bits_per_byte"] == pytest.approx(recorded, abs=1e-5)
    whole = {key: manifest["splits"]["train"][key] for key in ("documents", "tokens", "bytes")}
    assert measured["splits"]["train"]["by_source"] == {"corpus.jsonl": whole}
    quick = measure_data(made.folder, with_tokens=False)["splits"]["train"]
    assert quick == {k: v for k, v in measured["splits"]["train"].items() if k != "token_frequencies"}


def test_shards_name_their_source(copy, capsys):
    """Where shards say which source they came from, counts and documents say it too, under distinct names."""

    def two_sources(manifest: dict) -> None:
        manifest["sources"] *= 2
        manifest["data"]["sources"] *= 2
        for number, shard in enumerate(manifest["splits"]["train"]["shards"]):
            shard["source"] = min(number, 1)

    change_manifest(copy, two_sources)
    by_source = measure_data(copy, with_tokens=False)["splits"]["train"]["by_source"]
    assert set(by_source) == {"corpus.jsonl", "corpus.jsonl (1)"}
    first = by_source["corpus.jsonl"]["documents"]
    rows = answer(capsys, "inspect", copy, "--document", first - 1, "--count", 2)
    assert [row["source"] for row in rows] == ["corpus.jsonl", "corpus.jsonl (1)"]


def test_inspect_shows_the_texts(made, capsys):
    """Every document of both splits reads as the text it was made of, whatever shard holds it."""
    found = []
    for split in ("train", "validation"):
        rows = answer(capsys, "inspect", made.folder, "--split", split, "--document", 0, "--count", 1000)
        assert [row["number"] for row in rows] == list(range(len(rows)))
        assert all(len(row["text"].encode()) == row["num_bytes"] for row in rows)
        found += [row["text"] for row in rows]
    assert sorted(found) == sorted(made.texts)


def test_inspect_draws_and_finds_documents(made, capsys):
    """The same seed draws the same documents; a search finds a text by a part of it."""
    draws = [answer(capsys, "inspect", made.folder, "--seed", seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2] and len(draws[0]) == 3
    wanted = Inspection(made.folder).document(40)
    assert answer(capsys, "inspect", made.folder, "--search", wanted["text"][:30]) == [wanted]
    assert "no document of train holds" in refusal(main, ["inspect", str(made.folder), "--search", "nowhere"])


def test_a_block_is_taken_apart_into_its_documents(made):
    """The parts of a block cover it without gaps, and their texts come from exactly those tokens."""
    inspection, length = Inspection(made.folder), 500
    stream = np.concatenate(documents_of(made.folder))
    shards = set()
    for number in range(0, (len(stream) - 1) // length, 3):
        block, end = inspection.block(number, length), 0
        for part in block["documents"]:
            (first, last), (begin, stop) = part["document_tokens"], part["block_tokens"]
            assert begin == end and last - first == stop - begin
            tokens = stream[number * length + begin : number * length + stop]
            assert (inspection.split.document(part["number"]).tokens[first:last] == tokens).all()
            shards.add(part["shard"])
            end = stop
        assert end == length + 1
    assert len(shards) > 3


def test_a_sample_is_the_one_training_reads(made, tmp_path, capsys):
    """Sample i of a recipe is the block that PackedDataset gives the Trainer at i, also in the next epoch."""
    recipe = load_recipe(str(recipe_file(tmp_path, made.source)))
    split = open_finished(made.folder).split("train")
    fingerprint = read_manifest(made.folder)["fingerprint"]
    order = GlobalOrder(split.num_blocks(32), recipe.data_seed, fingerprint)
    dataset = PackedDataset(split, 32, order, num_samples=10_000)

    def shown(sample: int, *settings: str) -> dict:
        words = ("--sample", sample, "--recipe", tmp_path / "small.json")
        return answer(capsys, "inspect", made.folder, *words, *chain(*product(["--set"], settings)))

    for sample in (0, 7, order.num_blocks + 3):  # by whatever name the data is read
        found = shown(sample, f"data.name=set-{sample}")
        assert found["split"] == "train"
        [(start, stop)] = found["stretches"]
        assert (dataset[sample]["input_ids"] == split.read(start, stop + 1)[:-1]).all()
        assert found["epoch"] == sample // order.num_blocks
        assert found["step"] == sample // recipe.samples_per_step + 1
        assert sum(last - first for first, last in (p["block_tokens"] for p in found["documents"])) == 33
    mixed = shown(3, "data.sources.0.weight=1", "data.sources.0.max_epochs=1e6")
    assert mixed["sample"] == 3 and sum(len(part["text"]) for part in mixed["documents"])


@pytest.mark.parametrize("mixing", [{}, {"weight": 1, "max_epochs": 1e6}])
def test_a_sample_of_a_part_is_the_one_its_run_reads(tmp_path, capsys, mixing):
    """With caps, in a data set that holds more; in a mixture the epoch is that of the sample's source."""
    sources = [write_jsonl(tmp_path / f"{n}.jsonl", make_texts(120, n)) for n in range(2)]
    folder = prepare(tmp_path / "data", recipe_for(*sources))
    caps = [
        {"path": str(path), "max_tokens": cap, **mixing}
        for path, cap in zip(sources, (700, 4000), strict=True)
    ]
    recipe = load_recipe(str(recipe_file(tmp_path, sources[0], sources=caps)))
    data = open_prepared(recipe, tmp_path / "data").for_run(recipe)
    dataset, whole = build_training_dataset(data, recipe, 0), open_finished(folder).split("train")
    epochs = set()
    for sample in (0, 1, 77, 78):
        shown = answer(capsys, "inspect", folder, "--sample", sample, "--recipe", tmp_path / "small.json")
        parts = [whole.document(p["number"]).tokens[slice(*p["document_tokens"])] for p in shown["documents"]]
        assert np.concatenate(parts)[:-1].tolist() == dataset[sample]["input_ids"].tolist()
        epochs.add(shown["epoch"])
        if mixing:
            source = int(dataset[sample]["source"])
            assert {part["source"] for part in shown["documents"]} == {f"{source}.jsonl"}
            assert shown["epoch"] == sample // 2 // data.mixture.num_blocks[source]
    assert not mixing or len(epochs) == 2


def test_a_packed_sample_shows_the_documents_it_is_made_of(made, tmp_path, capsys):
    """With `data.packing` best_fit: the parts follow each other without gaps and are a packed block's tokens."""
    file = recipe_file(tmp_path, made.source)
    file.write_text(file.read_text().replace('"name": "corpus",', '"name": "corpus", "packing": "best_fit",'))
    split = open_finished(made.folder).split("train")
    dataset = PackedDataset(split, 32, packing="best_fit")
    samples = map(dataset.read_block, range(dataset.num_blocks))
    blocks = [[*sample["input_ids"], sample["labels"][-1]] for sample in samples]
    stretches = 0
    for sample in range(6):
        shown = answer(capsys, "inspect", made.folder, "--sample", sample, "--recipe", file)
        tokens: list[int] = []
        for part in shown["documents"]:
            assert part["block_tokens"][0] == len(tokens)
            tokens += split.document(part["number"]).tokens[slice(*part["document_tokens"])].tolist()
        assert tokens in blocks
        stretches += len(shown["stretches"])
    assert stretches > 6


NOT_THERE = {
    "leave out --sequence_length": "--sample 1 --recipe tiny --sequence_length 32",
    "counted from 0 to": "--document 4000",
    "--block 4000: train has": "--block 4000 --sequence_length 32",
    "--block needs --sequence_length or --recipe": "--block 1",
    "--sample needs --recipe": "--sample 1",
    "did you mean 'train'?": "--split trian",
    "trains on": "--sample 1 --recipe tiny",
}


@pytest.mark.parametrize("said", NOT_THERE)
def test_inspect_refuses_what_is_not_there(made, said):
    """One line that says what there is."""
    assert said in refusal(main, ["inspect", str(made.folder), *NOT_THERE[said].split()])


NO_EFFECT = (
    "stats D --no-tokens --top 3",
    "inspect D --set training.seed=1",
    "inspect D --recipe tiny",
    "inspect D --sequence_length 5",
    "inspect D --block 0 --sequence_length 10 --recipe tiny",
    "inspect D --block 0 --sequence_length 10 --count 3",
    "inspect D --document 1 --seed 3",
    "convert D --to megatron OUT --tokenizer x",
    "convert D --to megatron OUT --validation_share 0.5",
    "convert D --from megatron IN --dtype int64",
    "convert D --from bin IN --column tokens",
)


@pytest.mark.parametrize("words", NO_EFFECT)
def test_an_option_that_would_change_nothing_is_refused(words):
    """Nobody reads an answer to another question than the one that was asked. It is always the last of them."""
    assert refusal(main, words.split()).startswith(f"{words.split()[-2]}: would change nothing")


def test_folders_that_hold_no_finished_data_are_one_line(made, tmp_path):
    """An unknown folder, one above the data, one whose preparation was interrupted: what, where, what to do."""
    said = refusal(main, ["verify", str(tmp_path / "nowhere")])
    assert "no such folder" in said and "python data_prep.py --recipe tiny" in said
    assert "data sets inside it: corpus" in refusal(main, ["stats", str(made.folder.parent)])
    (tmp_path / "half" / "train").mkdir(parents=True)
    message = refusal(main, ["inspect", str(tmp_path / "half")])
    assert "no manifest.json" in message and "run data_prep.py to its end" in message


def test_the_command_line_is_cheap_and_honest(made, capsys):
    """Help names every form and loads nothing heavy; a damaged argument is exit code 2 without a traceback."""
    program = "import sys, pretraining.data.__main__; sys.exit(bool({'numpy', 'pyarrow', 'torch'} & set(sys.modules)))"
    completed([sys.executable, "-c", program])
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    summary = capsys.readouterr().out.partition("positional arguments")[0]
    assert all(form in summary for form in (*FORMATS, *READ_ONLY))
    with pytest.raises(SystemExit):
        main(["quality", "--help"])
    helped = capsys.readouterr().out
    assert "FILE" in helped and "DIR" not in helped
    assert "tokens per document" in completed([*TOOL, "stats", made.folder, "--no-tokens"]).stdout
    assert execute([*TOOL, "verify", made.folder / "nowhere"]).refusal.startswith("error: ")


def test_a_missing_tokenizer_is_one_line(copy):
    """Without its tokenizer the data set cannot be read as text, and every verb says so by the file's name."""
    path = copy / "tokenizer" / "tokenizer.json"
    path.unlink()
    for words in (["stats"], ["inspect"], ["verify"]):
        assert f"{path}: missing" in refusal(main, [*words, str(copy)])
    assert f"{path}: missing" in refusal(main, ["push", str(copy), "someone/corpus", "--dry_run"])
    measure_data(copy, with_tokens=False)


def test_verify_reads_everything(made, capsys):
    """A whole data set passes, and the answer counts what was read."""
    found = answer(capsys, "verify", made.folder)
    manifest = read_manifest(made.folder)
    splits = manifest["splits"].values()
    assert found["shards"] == sum(len(split["shards"]) for split in splits) > 5
    assert (found["documents"], found["size"]) == (120, sum(s["size"] for e in splits for s in e["shards"]))


def test_documents_may_begin_with_a_token_of_their_own(tmp_path, capsys):
    """Both around each; text as it was; a verify of other borders finds the first document; prompts begin so too."""
    source = write_jsonl(tmp_path / "texts.jsonl", texts := make_texts(60))
    recipe = recipe_for(source, borders="bos_eos")
    folder = prepare(tmp_path / "data", recipe)
    documents = documents_of(folder)
    assert all(each[0] == each[-1] == 0 and not (each[1:-1] == 0).any() for each in documents)
    assert verify_data(folder)["documents"] == 60
    assert Inspection(folder).document(0)["text"] in texts
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert encode_start(tokenizer, "x") == [0, *encode(tokenizer, "x")] and encode_start(tokenizer, "") == [0]
    without = recipe_for(source)
    assert "data.borders" in refusal(prepare, tmp_path / "data", without)
    plain = prepare(tmp_path / "plain", without)
    change_manifest(plain, lambda manifest: manifest["data"].update(borders="bos"))
    assert "document 0 of the shard does not begin with token 0" in refusal(verify_data, plain)
    config = folder / "tokenizer" / "tokenizer_config.json"
    config.write_text(config.read_text().replace("bos_token", "begin_token"))
    named = recipe_for(source, name="no-bos", tokenizer=str(folder / "tokenizer"), borders="bos")
    assert "has no bos_token" in refusal(prepare, tmp_path / "data", named)


DAMAGED = {
    "tokenizer": "tokenizer/tokenizer.json",
    "tokenizer_config": "tokenizer/tokenizer_config.json",
    "state": "train/state.json",
    "positions": "validation_positions.npy",
    "no-positions": "validation_positions.npy",
}


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "swap", *DAMAGED])
def test_verify_names_the_damaged_file(copy, damage):
    """Any damaged file is named in one line that says what to do."""
    shards = sorted((copy / "train").glob("*.arrow"))
    path = copy / DAMAGED[damage] if damage in DAMAGED else shards[2]
    content = bytearray(path.read_bytes())
    if damage in ("missing", "no-positions"):
        path.unlink()
    elif damage == "swap":
        shards[3].rename(path)
        shards[3].write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-8])
    elif damage in ("flip", "positions"):
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.write_text(path.read_text().replace("o", "0", 1))
    message = refusal(verify_data, copy)
    assert str(path) in message and "copy it again" in message


@pytest.mark.parametrize(
    ("document", "num_bytes", "problem"),
    [([5, 6, 7], 3, "does not end with"), ([5, 279, 280, 0], 3, "token id 280"), ([], 0, "has no tokens")],
)
def test_verify_finds_what_checksums_cannot(copy, document, num_bytes, problem):
    """Shards with right checksums are still refused where their documents are not what a model can read."""
    writer = SplitWriter(copy / "wrong", np.dtype(np.uint16))
    writer.append(np.array([5, 0], np.uint16), 1)
    writer.append(np.array(document, np.uint16), num_bytes)
    put_split(copy, "validation", writer, unigram_bits_per_byte=1.0)
    assert problem in refusal(verify_data, copy)


def test_verify_finds_a_changed_manifest(copy):
    """Counts that do not add up, and a fingerprint that is not that of the checksums."""
    manifest = read_manifest(copy)
    other = {**manifest, "fingerprint": "0" * 32}
    (copy / "manifest.json").write_text(json.dumps(other))
    assert "its fingerprint is not that of its checksums" in refusal(verify_data, copy)
    manifest["splits"]["train"]["tokens"] += 1
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert "damaged manifest: the shards of train hold" in refusal(verify_data, copy)


def test_the_card_is_what_datasets_loads_by(made):
    """With the card beside the shards, `load_dataset` finds both splits with all their documents."""
    import datasets
    import yaml

    card = plan_push(made.folder, REPOSITORY_ID)["card"]
    configs = yaml.safe_load(card.split("---")[1])["configs"]
    files = {file["split"]: str(made.folder / file["path"]) for file in configs[0]["data_files"]}
    found = datasets.load_dataset("arrow", data_files=files, cache_dir=str(made.root / "cache"))
    for split in ("train", "validation"):
        assert found[split]["input_ids"][:] == [d.tolist() for d in documents_of(made.folder, split)]
    manifest = read_manifest(made.folder)
    for number in (manifest["splits"]["train"]["tokens"], manifest["tokenizer"]["vocab_size"]):
        assert f"{number:,}" in card


def test_push_sends_everything_and_the_manifest_last(made, tmp_path):
    """What arrives at the hub is the data set, whole; the manifest comes with the last commit, stale shards go."""
    with LocalHub() as hub:
        hub.files["train/data-00099-of-00100.arrow"] = b"of an earlier push"
        words = [*TOOL, "push", made.folder, REPOSITORY_ID, "--private", "--json"]
        assert json.loads(completed(words, **hub.environment).stdout)["url"].endswith(REPOSITORY_ID)
        assert hub.created[0]["type"] == "dataset" and "manifest.json" not in hub.commits[0]
        assert set(hub.commits[-1]) == {"README.md", "manifest.json", "train/data-00099-of-00100.arrow"}
        for name, content in hub.files.items():
            (tmp_path / "got" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "got" / name).write_bytes(content)
        assert verify_data(tmp_path / "got")["documents"] == 120 and "validation_positions.npy" in hub.files
        hub.refuse_with = 403
        assert "HF_TOKEN" in execute(words, **hub.environment).refusal


def test_an_older_manifest_with_a_credential_is_not_published(copy):
    """Data that was prepared before recipes with credentials were refused."""
    address = "s3://AKIDEXAMPLE:sesame@bucket/text"
    change_manifest(copy, lambda manifest: manifest["sources"][0].update(path=address))
    said = refusal(plan_push, copy, REPOSITORY_ID)
    assert "manifest.json: sources.0.path: s3://***@bucket/text holds a credential" in said


def test_push_without_a_hub_or_a_name_is_one_line(made, tmp_path, capsys):
    """A dry run sends nothing and needs no network; a wrong name and a silent hub cost one line."""
    main(["push", str(made.folder), REPOSITORY_ID, "--dry_run"])
    shown = capsys.readouterr().out
    assert all(path.name in shown for path in (made.folder / "train").iterdir())
    assert "is not a repository name" in refusal(main, ["push", str(made.folder), "a/b/c"])
    finished = execute([*TOOL, "push", made.folder, REPOSITORY_ID, "--json"], HF_TOKEN="hf_local")
    assert "the hub cannot be reached" in finished.refusal
