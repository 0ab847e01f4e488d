"""Promise 3 for data: tasks finish one by one, are never redone, and give the same bytes whoever runs them."""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data_prep import main
from pretraining.data.manifest import read_manifest
from pretraining.data.preparation.execution import run_slurm_job
from pretraining.data.preparation.plan import Preparation
from tests.gear.finished_data import data_prep, recipe_file, refusal, write_jsonl
from tests.gear.local_hub import REPOSITORY_ID, LocalHub
from tests.gear.runs import Started, bytes_of, completed, execute
from tests.gear.slurm_cluster import cluster, installed

# Small pieces, so that a small corpus has many tasks; everything else is the command itself.
PROGRAM = """
import runpy, sys
from pretraining.data import corpus
corpus.PIECE_BYTES, corpus.TASK_PIECES = 6000, 2
sys.argv = ["data_prep.py", *sys.argv[1:]]
runpy.run_path("data_prep.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Twelve files of modules of the standard library, some of them copies, one that looks like an evaluation set."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    modules = sorted((Path(json.__file__).parents[1]).glob("[c-s]*.py"))
    chosen = [path.read_text() for path in modules if 2000 < path.stat().st_size < 9000][:36]
    for number in range(0, len(chosen), 3):
        texts = [*chosen[number : number + 3], chosen[0], chosen[number].replace("self", "this", 1)]
        write_jsonl(folder / f"{number:02d}.jsonl", texts)
    (folder.parent / "sets").mkdir()
    (folder.parent / "sets" / "quiz.txt").write_text(chosen[5][200:500])
    return folder


CLEANED = {
    "filters": [{"rule": "length", "min_words": 5}, {"rule": "pii"}],
    "dedup": {"exact": True, "minhash": {}},
}


def command(recipe: Path, root: Path, *more: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, "--recipe", str(recipe), "--data_dir", str(root), *more]


def prepared(recipe: Path, root: Path, *more: str) -> dict:
    completed(command(recipe, root, *more))
    return bytes_of(root / "corpus")


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory) -> tuple[Path, dict]:
    """(recipe, bytes) of the cleaned corpus, prepared by one undisturbed process."""
    folder = tmp_path_factory.mktemp("reference")
    cleaned = {**CLEANED, "decontaminate": {"folder": str(corpus.parent / "sets")}}
    recipe = recipe_file(folder, corpus, **cleaned)
    return recipe, prepared(recipe, folder / "data", "--executor", "inline")


def test_filters_copies_and_evaluation_sets_are_counted(corpus, reference):
    """The manifest says what each of them cost."""
    manifest = read_manifest(reference[0].parent / "data" / "corpus")
    # Eleven copies of the first text; and of each third text one in which a word is another, found by `"minhash": {}`.
    assert manifest["duplicates"]["dropped"] >= 20 and manifest["decontamination"]["dropped"] >= 1
    assert manifest["filters"]["documents"] > manifest["filters"]["kept_documents"] - 1
    # An example says where a user finds both documents: file, and line or byte.
    for example in manifest["duplicates"]["examples"]:
        assert example["dropped"] != example["kept"]
        assert {Path(place.rpartition(":")[0]).parent for place in example.values()} == {corpus}
    kept = sum(split["documents"] for split in manifest["splits"].values())
    fates = manifest["duplicates"]["fates"]
    assert kept == fates["train"] + fates["validation"]


def test_workers_do_not_change_a_byte(reference, tmp_path):
    """Two processes: the shards, the manifest and the reports of one."""
    recipe, expected = reference
    assert prepared(recipe, tmp_path / "data", "--executor", "local", "--workers", "2") == expected


@pytest.mark.parametrize("executor, caps", [("local", [{}]), ("inline", [{"max_documents": 40}, {}])])
def test_every_task_reads_the_commit_that_was_found_at_the_start(tmp_path, executor, caps):
    """The hub's main has other text as soon as it was asked for: no process that works on the preparation sees it.

    One that goes on from a cap while the hub is silent reads the rest of that commit: it is assumed to be still there.
    """
    with LocalHub() as hub:
        for rows in (30, 20):
            lines = "".join(json.dumps({"text": f"row {row} of this version"}) + "\n" for row in range(rows))
            hub.versions.append({f"train-{part:05d}-of-00003.jsonl": lines.encode() for part in range(3)})
        asked = {**hub.environment, "HF_HOME": tmp_path / "hub"}
        for cap in caps:
            source = {"dataset": REPOSITORY_ID, **cap}
            recipe = recipe_file(tmp_path, tmp_path, sources=[source], tokenizer={"units": "bytes"})
            completed(command(recipe, tmp_path / "data", "--executor", executor, "--workers", "2"), **asked)
            hub.is_silent_about_main = True
    (source,) = read_manifest(tmp_path / "data" / "corpus")["sources"]
    assert (source["commit"], source["documents"]) == ("0" * 40, 90)


def tasks_done(root: Path) -> dict[str, int]:
    """{finished task: when it was written, in ns}."""
    found = (root / ".corpus.work").glob("*/[0-9]*-*")
    return {f"{path.parent.name}/{path.name}": path.stat().st_mtime_ns for path in found}


def test_killed_again_and_again_no_finished_task_is_redone(reference, tmp_path):
    """SIGKILL at random moments until the preparation is through: the same bytes, and no task ran twice."""
    recipe, expected = reference
    root, generator, kills = tmp_path / "data", random.Random(1), 0
    seen: dict[str, int] = {}
    for _ in range(4):
        started = Started(command(recipe, root, "--executor", "inline"))
        time.sleep(generator.uniform(0.4, 2.0))
        kills += started.process.poll() is None
        started.kill()
        now = tasks_done(root)
        assert all(now.get(task, when) == when for task, when in seen.items())
        assert (root / "corpus").exists() or seen.keys() <= now.keys()
        seen |= now
    assert kills >= 2 and prepared(recipe, root) == expected
    assert [path.name for path in root.iterdir()] == ["corpus"]


def test_a_mended_file_repeats_only_its_own_tasks(corpus, reference, tmp_path):
    """With a given tokenizer. A bad line that a worker finds is told in one line; what the other files gave is used."""
    tokenizer = reference[0].parent / "data" / "corpus" / "tokenizer"
    own = Path(shutil.copytree(corpus, tmp_path / "texts"))
    recipe = recipe_file(tmp_path, own, tokenizer=str(tokenizer))
    root, last = tmp_path / "data", sorted(own.iterdir())[-1]
    whole = last.read_text()
    last.write_text(whole + "{broken\n")
    failed = execute(command(recipe, root, "--executor", "local", "--workers", "2"))
    assert failed.code == 2 and failed.stderr.count("error: ") == 1, failed.output
    said = f"error: {last}:byte {len(whole)}: not valid JSON"
    assert said in failed.stderr and "Traceback" not in failed.stderr
    kept = tasks_done(root)
    assert len([task for task in kept if task.startswith("tokenize/")]) >= 3
    last.write_text(whole)
    log = tmp_path / "tasks"
    watched = PROGRAM.replace("corpus.PIECE", WATCHED.format(log=str(log)))
    words = command(recipe, root, "--executor", "inline")
    completed([words[0], "-c", watched, *words[3:]])
    ran = log.read_text().split()
    assert ran and not set(ran) & set(kept)


WATCHED = """
from pretraining.data.preparation import execution
run_task = execution.run_task
def logged(stage, number, progress):
    open({log!r}, "a").write(f"{{stage.name}}/{{stage.folder(number).name}}\\n")
    run_task(stage, number, progress)
execution.run_task = logged
corpus.PIECE"""


PICKLES = b"\x80"
"""How every pickle of protocol 2 or later begins."""


def files_of_work(root: Path) -> list[Path]:
    return [path for path in (root / ".corpus.work").rglob("*") if path.is_file()]


def test_what_is_kept_holds_no_pickle_and_is_named(corpus, tmp_path):
    """A refused preparation says where finished tasks are kept: JSON, Arrow and plain arrays, whoever runs them."""
    evaluation = {"folder": str(corpus.parent / "sets")}
    recipe = recipe_file(tmp_path, corpus, **CLEANED, decontaminate=evaluation, validation_share=1e-9)
    root = tmp_path / "data"
    failed = execute(command(recipe, root, "--executor", "local", "--workers", "2"))
    assert failed.code == 2 and f"; finished tasks are kept in {root / '.corpus.work'}" in failed.stderr
    files = files_of_work(root)
    assert {path.suffix for path in files} == {".json", ".arrow", ".npy", ".npz"}
    assert {"preparation.json", "index.json"} <= {path.name for path in files}
    assert not [path for path in files if path.read_bytes()[:1] == PICKLES]
    for path in files:
        if path.suffix in (".npy", ".npz"):
            np.load(path, allow_pickle=False)


KILLER = """
import os, pathlib
def keep(text, beginning, folder, times):
    deaths = len(os.listdir(folder))
    if text.startswith(beginning) and deaths < times:
        pathlib.Path(folder, str(deaths)).touch()
        os.kill(os.getpid(), 9)
    return True
"""


def recipe_that_kills(corpus, folder, times: int):
    """A recipe of three files with a rule that ends its worker so often; `folder / "deaths"` counts them."""
    own, deaths = folder / "texts", folder / "deaths"
    own.mkdir()
    deaths.mkdir()
    for path in sorted(corpus.iterdir())[:3]:
        shutil.copy(path, own)
    victim = json.loads((own / "03.jsonl").read_text().splitlines()[1])["text"][:300]
    (folder / "killer.py").write_text(KILLER)
    arguments = {"beginning": victim, "folder": str(deaths), "times": times}
    rule = {"rule": "callable", "import": f"{folder / 'killer.py'}:keep", "arguments": arguments}
    return recipe_file(folder, own, filters=[rule])


@pytest.mark.parametrize("times", [1, 3])
def test_a_worker_that_is_killed_costs_its_own_task_alone(corpus, tmp_path, times):
    """As by the kernel where memory runs out: run again behind the others; a task that kills thrice is named."""
    recipe = recipe_that_kills(corpus, tmp_path, times)
    finished = execute(command(recipe, tmp_path / "data", "--executor", "local", "--workers", "2", "--json"))
    assert finished.stderr.count("was ended (signal 9): the task is run again") == min(times, 2)
    assert finished.code == (0 if times == 1 else 2) and not finished.strays, finished.output
    said = [line for line in finished.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == (times == 3) and all("of the stage 'clean'" in line for line in said)
    assert len(list((tmp_path / "deaths").iterdir())) == times


@pytest.mark.parametrize("executor", ["inline", "local"])
def test_ctrl_c_is_one_line_and_keeps_what_is_finished(reference, tmp_path, executor):
    """Exit code 130; no worker is left, and the same command goes on."""
    started = Started(command(reference[0], tmp_path / "data", "--executor", executor, "--workers", "2"))
    while not (kept := tasks_done(tmp_path / "data")):
        time.sleep(0.002)
    started.interrupt()
    finished = started.finish()
    assert finished.code == 130 and not finished.strays, finished.output
    assert finished.stderr.splitlines()[-1].startswith("error: interrupted; what is finished is kept")
    assert "Traceback" not in finished.stderr and kept.items() <= tasks_done(tmp_path / "data").items()


@pytest.mark.parametrize("key", ["path", "dataset"])
def test_a_file_that_changes_meanwhile_is_named(corpus, tmp_path, key):
    """Its tokens are not taken for those of the file that the manifest would name; of a dataset, the folder is."""
    own, writer = tmp_path / "texts", tmp_path / "writer.py"
    own.mkdir()
    for path in sorted(corpus.iterdir())[:2]:
        victim = shutil.copy(path, own)
    writer.write_text("def keep(text, path):\n    open(path, 'a').write('\\n')\n    return True\n")
    rule = {"rule": "callable", "import": f"{writer}:keep", "arguments": {"path": str(victim)}}
    recipe = recipe_file(tmp_path, own, filters=[rule], sources=[{key: str(own)}])
    finished = execute(command(recipe, tmp_path / "data"))
    assert finished.code == 2 and not (tmp_path / "data" / "corpus").exists()
    named = victim if key == "path" else own
    assert f"error: {named}: changed or removed while it was being prepared" in finished.stderr


@pytest.mark.parametrize("key", ["filters.1", "decontaminate.folder"])
def test_a_list_that_changes_meanwhile_is_named(corpus, tmp_path, key):
    """What is left out follows from the words, or the evaluation sets, of which the manifest has the checksum."""
    writer, words = tmp_path / "writer.py", tmp_path / "sets" / "words.txt"
    words.parent.mkdir()
    words.write_text("licence\n")
    writer.write_text("def keep(text, path):\n    open(path, 'a').write('word\\n')\n    return True\n")
    rules = [{"rule": "callable", "import": f"{writer}:keep", "arguments": {"path": str(words)}}]
    if key == "filters.1":
        rules.append({"rule": "blocklist", "path": str(words)})
        recipe = recipe_file(tmp_path, corpus, filters=rules)
    else:
        sets = {"folder": str(words.parent), "shortest": 1}
        recipe = recipe_file(tmp_path, corpus, filters=rules, decontaminate=sets)
    finished = execute(command(recipe, tmp_path / "data", "--executor", "inline"))
    assert finished.code == 2 and not (tmp_path / "data" / "corpus").exists()
    assert f"data.{key}: what it reads has changed while the data was prepared" in finished.stderr


NONSENSE = {
    "did you mean 'partition'": ["--slurm", "partitoin=cpu"],
    "takes a whole number": ["--executor", "slurm", "--slurm", "cpus_per_task=many"],
    "partition=NAME is missing": ["--executor", "slurm"],
    "add --executor slurm": ["--slurm", "partition=cpu"],
    "tasks_per_job is at least 1": ["--executor", "slurm", "--slurm", "tasks_per_job=0"],
}


@pytest.mark.parametrize("said", NONSENSE)
def test_options_of_a_cluster_that_make_no_sense_are_one_line(corpus, tmp_path, monkeypatch, said):
    words = data_prep(recipe_file(tmp_path, corpus), tmp_path / "data", *NONSENSE[said])
    monkeypatch.setattr(sys, "argv", words[1:])
    assert said in refusal(main)


SBATCH = """#!/bin/bash
number=$(ls {jobs}/*.script | wc -l)
echo "$@" > {jobs}/$number.options
cp "${{@: -1}}" {jobs}/$number.script
echo Submitted batch job $((100 + number))
"""
SRUN = """#!/bin/bash
shift 3
exec "$@"
"""


def test_jobs_of_a_cluster_give_the_same_bytes_without_a_pickle(reference, tmp_path):
    """What sbatch is given, kept by a program that stands in for it, then run: several arrays a stage.

    A process for each job, as on a cluster, takes ten seconds together.
    """
    recipe, expected = reference
    programs, jobs, root = (tmp_path / name for name in ("programs", "jobs", "data"))
    for folder in (programs, jobs):
        folder.mkdir()
    (programs / "sbatch").write_text(SBATCH.format(jobs=jobs))
    (programs / "srun").write_text(SRUN)
    for program in programs.iterdir():
        program.chmod(0o755)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}"}
    options = ["--executor", "slurm", "--slurm", "partition=cpu", "--slurm", "tasks_per_job=20", "--json"]
    options += ["--workers", "3", "--slurm", "qos=low", "--slurm", "mem_per_cpu_gb=4"]
    submitted = completed(command(recipe, root, *options, "--slurm", "max_array_size=1"), **variables)
    numbers = range(len(list(jobs.glob("*.script"))))
    scripts = [(jobs / f"{number}.script").read_text() for number in numbers]
    waits = [(jobs / f"{number}.options").read_text().split()[0] for number in numbers]
    assert waits[1:3] == ["--dependency=afterok:100", "--dependency=afterok:100,afterany:101"]
    assert len(json.loads(submitted.stdout)["jobs"]) == 7 < len(scripts)
    for number, script in enumerate(scripts):
        assert "#SBATCH --array=0-0%3\n" in script and "#SBATCH --requeue\n" in script
        assert "#SBATCH --qos=low\n" in script and "#SBATCH --mem-per-cpu=4G\n" in script
        if number == numbers[-1]:  # it publishes, and removes the work folder
            assert not [path for path in files_of_work(root) if path.read_bytes()[:1] == PICKLES]
        completed(["bash", jobs / f"{number}.script"], **variables, SLURM_ARRAY_TASK_ID="0")
    assert bytes_of(root / "corpus") == expected


def test_a_job_whose_node_is_taken_back_is_queued_again(tmp_path, monkeypatch):
    """SIGUSR1, as clusters send it before they take a node: `scontrol requeue`, then the end."""
    (tmp_path / "scontrol").write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/asked\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(FileNotFoundError):  # no work folder; by then the signal is expected
            run_slurm_job(tmp_path, "clean", 0)
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.value.code == 15 and (tmp_path / "asked").read_text() == "requeue 4711\n"


def test_a_job_that_another_version_submitted_is_one_line(tmp_path):
    """What it had noted has another form; the command notes it anew, and takes what is finished."""
    (tmp_path / "preparation.json").write_text(json.dumps({"folder": str(tmp_path / "corpus")}))
    said = refusal(Preparation.load, tmp_path)
    assert "preparation.json: another version" in said and "wrote it; run the same" in said


@pytest.mark.skipif(
    not (installed() and os.environ.get("SLURM_TESTS")),
    reason="a minute long; SLURM_TESTS=1 runs it after: apt-get install slurmctld slurmd slurm-client",
)
def test_a_cluster_gives_the_same_bytes(reference, tmp_path):
    """A real SLURM cluster of one node: a job array a stage, each after the one before, the last one publishes."""
    recipe, expected = reference
    with cluster(tmp_path / "slurm") as slurm:
        options = ["--executor", "slurm", "--slurm", "partition=cpu", "--slurm", "time=10:00"]
        options += ["--slurm", "tasks_per_job=12", "--json"]
        submitted = completed(command(recipe, tmp_path / "data", *options), **slurm.variables)
        assert len(json.loads(submitted.stdout)["jobs"]) == 7
        slurm.wait_for_jobs()
        logs = "\n".join(path.read_text()[-1500:] for path in (tmp_path / "data").rglob("*.out"))
        assert (tmp_path / "data" / "corpus").exists(), logs
    assert bytes_of(tmp_path / "data" / "corpus") == expected
