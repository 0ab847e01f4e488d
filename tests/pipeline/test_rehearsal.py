"""What would fail in the first minutes on many nodes fails in a rehearsal, in one line; and a sound run passes it."""

import json
import os
import re
import shutil
import socket
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import fsspec
import pytest

import train
from pretraining.command_line import parse_train_arguments
from pretraining.errors import UserError
from pretraining.recipe.refusals import load_recipe_and_ds_config
from pretraining.rehearsal.rank import RankPlace
from pretraining.rehearsal.rehearsal import Rehearsal, rehearse
from tests.gear.finished_data import refusal
from tests.gear.runs import LAUNCHED, MODELS, Workshop, completed, execute, forked_programs, launcher
from tests.gear.served import Served

RANKS = 60
MANY = ("--world_size", RANKS, "--nodes", 7)
ONE_EACH = ("training.per_device_train_batch_size=1", "budget.tokens=38400")
ONE_EACH += (f"budget.tokens_per_step={RANKS * 64}",)
"""A step of one sequence a rank."""
FEW_RANKS = (*launcher("plain", 1), "-m", "tests.gear.few_ranks")


def words_of(workshop: Workshop, folder: Path, *words, settings=()) -> list[str]:
    """The options of a rehearsal of the small recipe."""
    typed = workshop.options("--output_dir", folder / "run", "--rehearse", *MANY, *words)
    for setting in (*ONE_EACH, *settings):
        typed += ["--set", setting]
    return typed


def rehearsed(workshop: Workshop, folder: Path, *words, settings=(), data: Path | None = None) -> None:
    """Rehearse in this process, as `train.py --rehearse` does."""
    typed = words_of(workshop, folder, *words, settings=settings)
    if data is not None:
        typed += ["--data_dir", str(data)]
    options = parse_train_arguments(typed)
    asked = options.recipe, options.set, options.deepspeed, options.world_size
    recipe, ds_config = load_recipe_and_ds_config(*asked)
    rehearse(recipe, ds_config, options, train.open_data, train.attempt)


@pytest.fixture
def without_ranks(monkeypatch):
    """Leave out the ranks, where another part is to fail."""
    monkeypatch.setattr(Rehearsal, "_ranks", lambda *_: "left out")


@pytest.fixture
def own_data(workshop, tmp_path) -> Path:
    """A copy of the prepared data, to be damaged."""
    shutil.copytree(workshop.data, tmp_path / "data")
    return tmp_path / "data"


def test_a_sound_run_passes_on_uneven_nodes(workshop, tmp_path):
    """60 ranks on 7 nodes, by the real command line: all that a start does is done twice by three ranks, which takes
    over ten seconds: six starts of the real Trainer and engine."""
    words = words_of(workshop, tmp_path, "--json", "--deepspeed", "zero3")
    finished = completed([sys.executable, "train.py", *words], **forked_programs())
    answer = json.loads(finished.stdout)
    assert not answer["faults"] and not (tmp_path / "run").exists()
    places = [(each["rank"], each["node"], each["local_rank"]) for each in answer["ranks"]]
    assert places == [(0, 0, 0), (30, 3, 3), (59, 6, 7)]
    for each in answer["ranks"]:
        first, second = each["starts"]
        assert (first["step"], second["step"]) == (1, 2)
        # the second start goes on behind the samples of the first step, and no other rank reads them
        assert first["samples"][0] == each["rank"] and second["samples"][0] == RANKS + each["rank"]
        assert f"checkpoint-1/rank-{each['rank']:05d}-of-00060.safetensors" in each["writes"]
        assert first["shards"] and first["sent"]["all_gather"][0] > 0
    assert len({each["starts"][0]["checkpoint_bytes"] for each in answer["ranks"]}) <= 3


def test_split_experts_are_rehearsed_with_routers_that_choose_all_alike(workshop, tmp_path):
    """Rank 0 of 60, ZeRO-2, four ranks a group: its share of the experts, and the exchange of rows."""
    settings = [f"model={json.dumps(MODELS['qwen3_moe'])}", "training.bf16=true"]
    settings.append("monitors.noise_scale_steps=null")
    words = words_of(workshop, tmp_path, "--deepspeed", "zero2:expert=2", "--json", settings=settings)
    finished = completed([*FEW_RANKS, *words], REHEARSED="0")
    assert "ranks        0, " in finished.stderr
    assert "still at work: 0; " in finished.stderr, "minutes, never silent"
    (rank,) = json.loads(finished.stdout)["ranks"]
    for start in rank["starts"]:
        # sizes, rows, choices and results of each layer, and the gradients of the last three
        assert start["sent"]["all_to_all"][0] % 7 == 0, start["sent"]


def test_a_rank_that_fails_is_named(workshop, tmp_path):
    """An extension that breaks on the last node alone, as a path that only the others have would."""
    extension = tmp_path / "last_node.py"
    extension.write_text(
        "import os\n\nfrom transformers import TrainerCallback\n\nfrom pretraining import extend\n\n\n"
        "@extend.callback\nclass LastNode(TrainerCallback):\n"
        "    def on_step_begin(self, *args, **kwargs):\n"
        "        if os.environ['RANK'] == '59':\n            open('/nowhere/at/all')\n"
    )
    words = words_of(workshop, tmp_path, settings=[f'extensions=["{extension}"]'])
    finished = execute([*FEW_RANKS, *words], REHEARSED="59")
    named = r"^error: ranks: rank 59: .*last_node.py: line 12: FileNotFoundError"
    assert finished.code == 2 and re.search(named, finished.stderr, re.M), finished.output


def test_damaged_data_is_named(workshop, tmp_path, own_data, without_ranks):
    """A tokenizer with a byte more, and a shard that is not there."""
    path = own_data / "corpus" / "tokenizer" / "tokenizer.json"
    written = path.read_text()
    path.write_text(written + "\n\n ")
    with pytest.raises(UserError, match=r"^data: .*not the one the data was made with"):
        rehearsed(workshop, tmp_path, data=own_data)
    path.write_text(written)
    next((own_data / "corpus" / "train").glob("*.arrow")).unlink()
    with pytest.raises(UserError, match=r"^data: .*\.arrow: shard is missing"):
        rehearsed(workshop, tmp_path, data=own_data)


class Unlisted(SimpleHTTPRequestHandler):
    """A web server that gives files, and no list of a folder."""

    def list_directory(self, path):
        self.send_error(404)


@pytest.mark.parametrize("handler", [SimpleHTTPRequestHandler, Unlisted])
def test_data_of_a_web_server_is_looked_at(workshop, tmp_path, own_data, without_ranks, capsys, handler):
    """It lists no sizes: each shard is asked for. One that is cut, and one that is not there, are named."""
    with Served(partial(handler, directory=own_data)) as server:
        words = ("--data_dir", server.address)
        rehearsed(workshop, tmp_path, *words)
        assert "all there" in capsys.readouterr().out
        shard = next((own_data / "corpus" / "train").glob("*.arrow"))
        os.truncate(shard, 1000)
        with pytest.raises(UserError, match=r"^data: .*\.arrow: shard is 1,000 bytes, expected"):
            rehearsed(workshop, tmp_path, *words)
        shard.unlink()
        assert re.search(r"^data: http.*\.arrow: not there", refusal(rehearsed, workshop, tmp_path, *words))


def test_a_finished_run_of_this_machine_is_no_fault_of_another(workshop, tmp_path, without_ranks, capsys):
    """`elsewhere` says that it does not look at disks here, and does not."""
    shutil.copytree(workshop.run("zero2").dir.path, tmp_path / "run")
    rehearsed(workshop, tmp_path, "--rehearse", "elsewhere")
    assert "run: not looked at" in capsys.readouterr().out


GIANT = ("model.n_embd=65536", "model.n_layer=32")
FAULTS = {
    # settings, then options; and what is said
    "budget.tokens_per_step=4096 budget.tokens=40960": r"4096 is not a multiple of 3840 = 60 ranks",
    "monitors.noise_scale_steps=null --deepspeed zero3:sequence=7": r"7: does not divide the 4 attention heads",
    " ".join(GIANT): r"^plan: .* need .* of disk, there is room for",
    f"{' '.join(GIANT)} training.save_strategy=no --gpu H100": r"^plan: small needs .* each of 60 GPUs of 80",
    "model.vocab_size=256": r"more than model.vocab_size 256",
    "data.name=other": r"^data: .*the data is not prepared; run: python data_prep",
    "training.report_to=clearml": r"^environment: .*'clearml' needs the package clearml",
    "checkpoints.upload=nowhere://bucket": r"^store: nowhere://bucket",
    'extensions=["/nowhere/own.py"]': r"/nowhere/own.py",
}


@pytest.mark.parametrize("typed", FAULTS)
def test_each_planted_fault_is_named_in_one_line(workshop, tmp_path, without_ranks, typed):
    settings, dashes, options = typed.partition(" --")
    words = (dashes.strip() + options).split()
    said = refusal(rehearsed, workshop, tmp_path, *words, settings=settings.split())
    assert re.search(FAULTS[typed], said) and "more, above" not in said
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_cannot_be_written_or_holds_another_run_is_named(workshop, tmp_path, without_ranks):
    """At hour zero the start would be refused."""
    (tmp_path / "run").write_text("a file")
    assert re.search(r"^run folder: .*run: Not a directory", refusal(rehearsed, workshop, tmp_path))
    (tmp_path / "run").unlink()
    shutil.copytree(workshop.run("zero2").dir.path, tmp_path / "run")
    assert re.search(r"^run folder: .*--allow_change", refusal(rehearsed, workshop, tmp_path))
    for name in ("recipe.json", "events.jsonl"):
        (tmp_path / "run" / name).unlink()
    assert re.search(r"^run folder: .*would be written over", refusal(rehearsed, workshop, tmp_path))


def test_an_unreachable_store_and_a_taken_port_are_both_named(
    workshop, tmp_path, without_ranks, monkeypatch, capsys
):
    """One rehearsal finds every fault; the line names the first and says how many more there are."""
    for name, value in {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # other tests have reached a store
    monkeypatch.setenv("PRETRAINING_DATA_PATIENCE_SECONDS", "0.2")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(UserError, match=r"^store: s3://bucket.* \(and 1 fault more, above\)"):
            rehearsed(workshop, tmp_path, settings=["checkpoints.upload=s3://bucket/runs"])
    said = capsys.readouterr().out
    assert "FAULT: MASTER_PORT=" in said and "not rehearsed: the ranks; mend" in said
    assert "left out" not in said


def test_nodes_without_a_store_are_warned_of(workshop, tmp_path, without_ranks, capsys):
    """Nothing committed is lost, which one node's disk alone cannot promise."""
    for settings, warned in (([], True), ([f"checkpoints.upload={tmp_path / 'store'}"], False)):
        rehearsed(workshop, tmp_path, settings=settings)
        assert ("note: unless all nodes share the disk of" in capsys.readouterr().out) == warned
    assert not (tmp_path / "store").exists()


def test_a_repository_of_the_hub_is_only_read(workshop, tmp_path, without_ranks, monkeypatch, capsys):
    """Each write there is a commit, which stays."""
    looked = []
    hub = fsspec.get_filesystem_class("hf")
    monkeypatch.setattr(hub, "ls", lambda self, path, *_, **__: looked.append(path))
    monkeypatch.setattr(hub, "open", lambda *_, **__: pytest.fail("it was written to"))
    rehearsed(workshop, tmp_path, settings=["checkpoints.upload=hf://datasets/owner/name@main/runs"])
    assert looked == ["datasets/owner/name"]
    assert "hf://datasets/owner/name@main/runs: can be read; whether" in capsys.readouterr().out


def test_data_and_disk_of_another_machine_may_be_missing(workshop, tmp_path, without_ranks, capsys):
    """`elsewhere` stands in for both, and says so."""
    rehearsed(workshop, tmp_path, "--rehearse", "elsewhere", settings=["data.name=other", *GIANT])
    assert "stand-in data, as " in capsys.readouterr().out


@pytest.mark.parametrize(("world_size", "nodes"), [(1000, 128), (1024, 128), (65_537, 8193), (3, 3)])
def test_each_rank_has_a_place_of_its_own(world_size, nodes):
    places = [RankPlace.of(rank, world_size, nodes) for rank in range(world_size)]
    assert len({(each.node, each.local_rank) for each in places}) == world_size
    sizes = {each.node: each.ranks_of_node for each in places}
    assert len(sizes) == nodes and sum(sizes.values()) == world_size
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert all(each.local_rank < each.ranks_of_node for each in places)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rehearse"], "needs --world_size"),
        (["--nodes", "2"], "--nodes goes with --plan"),
        (["--plan", "--nodes", "2"], "at most N nodes"),
        (["--rehearse", "--world_size", "2", "--nodes", "3"], "at most N nodes"),
        (["--rehearse", "--plan", "--world_size", "2"], "two questions"),
        (["--rehearse", "--world_size", "2", "--resume", "runs/a/checkpoint-3"], "leave --resume PATH out"),
        (["--deepspeed", ""], "--deepspeed: is empty"),  # of an unset variable of the shell
    ],
)
def test_options_that_do_not_go_together_are_refused(words, named):
    with pytest.raises(UserError, match=named):
        parse_train_arguments(["--recipe", "features/gpt2", *words])


def test_a_rehearsal_is_one_process(workshop, tmp_path, without_ranks, monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setitem(os.environ, name, value)
    assert re.search(r"^environment: a rehearsal is one process", refusal(rehearsed, workshop, tmp_path))
