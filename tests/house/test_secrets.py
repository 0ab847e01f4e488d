"""Secrets never leave: what a recipe or a command line holds is refused, and every line that leaves is masked."""

import ast
import gzip
import json
import os
import re
import sys
from pathlib import Path

import pytest

import data_prep
import train
from pretraining.data.corpus import open_source
from pretraining.data.tokenizer import save_tokenizer
from pretraining.errors import UserError, one_line_errors
from pretraining.extend import load_pretrained
from pretraining.outside.addresses import refuse_credentials
from pretraining.outside.masking import escaped, masked
from pretraining.recipe.data import Source
from pretraining.runtime.console_log import kept_console
from pretraining.runtime.failures import kept_failure
from pretraining.runtime.run_folder import RunFolder
from tests.gear.finished_data import refusal
from tests.gear.runs import REPOSITORY, SMALL_RECIPE

SECRET = "wJalrXUtnFEMIK7MDENG"
WITH_PASSWORD, BY_USER_ALONE = f"s3://AKIDEXAMPLE:{SECRET}@bucket/x", f"https://{SECRET}@host/x"
BY_SIGNATURE = f"https://host/x?st=2026-01-01&se=2026-02-01&sp=r&sig={SECRET}"
CREDENTIAL, OWN = "holds a credential", {"name": "own", "path": BY_SIGNATURE}
WAYS = {
    "path of a source": ({"data.sources": [{"path": WITH_PASSWORD}]}, [], CREDENTIAL),
    "path of a source of validation": ({"data.validation": {"sources": [OWN]}}, [], CREDENTIAL),
    "folder of decontamination": ({"data.decontaminate": {"folder": WITH_PASSWORD}}, [], CREDENTIAL),
    "tokenizer": ({"data.tokenizer": f"hf_{SECRET}@name"}, [], CREDENTIAL),
    "initial weights": ({"model.initial_weights": BY_USER_ALONE}, [], CREDENTIAL),
    "--data_dir": ({}, ["--data_dir", WITH_PASSWORD], CREDENTIAL),
    "--resume": ({}, ["--resume", BY_SIGNATURE], CREDENTIAL),
    "--set, misspelt": ({}, ["--set", f"checkpoints.uplod={WITH_PASSWORD}"], CREDENTIAL),
    "a key of the recipe, misspelt": ({"checkpoints.uplod": WITH_PASSWORD}, [], "unknown key"),
    "--set, wrong type": ({}, ["--set", f"checkpoints.keep_last={BY_USER_ALONE}"], CREDENTIAL),
    "wrong type in the recipe": ({"checkpoints.keep_last": BY_SIGNATURE}, [], "where an integer"),
    "training.hub_token": ({}, ["--set", f"training.hub_token={SECRET}"], "does not belong here"),
    "an option that there is not": ({}, ["--hub_token", SECRET], "unrecognized arguments"),
    "a user alone": ({"checkpoints.upload": BY_USER_ALONE}, [], CREDENTIAL),
    "a date of a signature": ({}, ["--data_dir", f"https://host/x?se={SECRET}"], CREDENTIAL),
    "a command": ({"monitors.notify": {"command": f"curl {BY_SIGNATURE}"}}, [], "holds a secret"),
    "the environment": ({"checkpoints.upload": "s3//bucket/" + SECRET}, [], "is no address"),
}


def written_recipe(folder: Path, changes: dict) -> Path:
    recipe = json.loads(json.dumps(SMALL_RECIPE))
    recipe["data"]["sources"] = [{"path": "text/*.txt"}]
    for key, value in changes.items():
        section, _, name = key.partition(".")
        recipe.setdefault(section, {})[name] = value
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe))
    return path


@pytest.mark.parametrize("command", [train, data_prep], ids=["train", "data_prep"])
@pytest.mark.parametrize("way", WAYS)
def test_no_way_to_pass_a_secret_brings_it_into_a_file_or_a_line(way, command, tmp_path, monkeypatch, capsys):
    """One line that does not repeat it, exit code 2, and nothing is written."""
    changes, words, said = WAYS[way]
    if command is data_prep and "--resume" in words:
        pytest.skip("an option of train.py alone")
    monkeypatch.setenv("WANDB_API_KEY", SECRET if way == "the environment" else "another-secret")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe").mkdir()
    recipe = written_recipe(tmp_path / "recipe", changes)
    words = [*words, "--output_dir", "run"] if command is train else words
    words = words if "--data_dir" in words else [*words, "--data_dir", "data"]
    monkeypatch.setattr(sys, "argv", [f"{command.__name__}.py", "--recipe", str(recipe), *words])
    with pytest.raises(SystemExit) as left, one_line_errors():
        command.main()
    shown = "".join(capsys.readouterr())
    assert left.value.code == 2 and said in shown
    assert SECRET not in shown and shown.count("\n") == 1, shown
    assert [path.name for path in tmp_path.iterdir()] == ["recipe"]


def test_what_a_run_keeps_and_prints_holds_no_secret(tmp_path, monkeypatch, capsys):
    """Its command, lines, events, failures and tracebacks: nothing in the run folder, nothing on the screen."""
    monkeypatch.setenv("MY_STORE_KEY", SECRET)
    monkeypatch.setattr(sys, "argv", ["train.py", "--data_dir", WITH_PASSWORD.replace(SECRET, SECRET[::-1])])
    run = RunFolder(tmp_path)
    with pytest.raises(ValueError), kept_console(run), kept_failure(run):
        run.begin()
        print("read", BY_SIGNATURE)
        run.add_event("upload", to=BY_SIGNATURE, files=[{"name": f"hf_{SECRET}"}], bytes=3)
        raise ValueError(f"denied for {SECRET}")
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"denied for ***" in kept and b"read https://host/x" in kept and b"s3://***@bucket/x" in kept
    assert SECRET.encode() not in kept and SECRET[::-1].encode() not in kept
    assert SECRET not in "".join(capsys.readouterr())


def test_a_traceback_of_a_command_holds_no_secret(monkeypatch, capsys):
    """A bug of ours is shown whole, and without the environment's secrets."""
    monkeypatch.setenv("MY_STORE_KEY", SECRET)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ValueError) as raised, one_line_errors():
        raise ValueError(f"denied for {SECRET}")
    sys.excepthook(raised.type, raised.value, raised.tb)
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and "ValueError: denied for ***\n" in shown and SECRET not in shown


WITHOUT = """
s3://bucket/key@version
hf://datasets/owner/name@main/file.jsonl
abfs://container@account.dfs.core.windows.net/runs
sftp://me@host/data
https://host:8080/files@v2/data?page=2&version=3
me@host:/data
org/model@0123456789abcdef0123456789abcdef01234567
curl -H 'Authorization: Bearer $TOKEN' https://host/hook?token=$TOKEN
budget.tokens=5e9
text/sk-SK-wikipedia-of-2026-05/*.txt
data.tokenizer=gpt2
training.hub_token_id=3
"""


@pytest.mark.parametrize("address", WITHOUT.strip().splitlines())
def test_addresses_without_a_secret_are_taken_and_shown_whole(address):
    refuse_credentials({"path": [address]}, "r.json")
    assert masked(address) == address


SHAPES = ["s3://KEY:SEC/RET@bucket", "https://ghtoken@github.com/me/data", "https://host/x?a=1&key=abc"]
SHAPES += ["https://host/x?X-Amz-Signature=abc", "AKIA" + "ABCD1234" * 2]
SHAPES += [f"{kind}{'a1B2c3D4' * 4}" for kind in ("hf_", "ghp_", "sk-proj-")]


@pytest.mark.parametrize("text", SHAPES)
def test_a_secret_of_a_known_shape_is_refused_at_any_depth(text):
    said = r"^r.json: data.sources.0.path: .*\*\*\*.* holds a credential"
    line = refusal(refuse_credentials, {"data": {"sources": [{"path": text}]}}, "r.json")
    assert re.search(said, line) and text not in line


def test_masking_takes_a_time_in_proportion_to_the_text():
    """A value of any length comes back; what looks like a beginning a hundred thousand times is no trap."""
    for part in ("?a", "://:", "token=", "https://", "-- ", "sk-"):
        assert escaped(masked(part * 100_000))


def test_text_of_strangers_is_shown_escaped(tmp_path):
    """A damaged archive's line repeats what the file holds, and moves no cursor and sets no colour."""
    path = tmp_path / "crawl.warc.gz"
    path.write_bytes(gzip.compress(b"\x1b[2J\x1b]0;owned\x07 no archive\r\n\r\n"))
    with pytest.raises(UserError) as damaged:
        list(open_source(Source(path=str(path))).documents())
    assert str(damaged.value).isprintable() and str(UserError("\x1b[2J")) == "\\x1b[2J"
    assert str(UserError("a\u202eb")) == "a\\u202eb" and escaped("Zürich\n\té") == "Zürich\n\té"


def test_every_load_of_the_package_refuses_code_of_its_source():
    """transformers asks on the terminal otherwise, and takes any `y` for a yes."""
    loads, unsafe = 0, []
    for path in sorted((REPOSITORY / "pretraining").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("from_pretrained", "from_config"):
                loads += 1
                given = calls[node].keywords if node in calls else []
                if not any(each.arg == "trust_remote_code" and each.value.value is False for each in given):
                    unsafe.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    assert loads >= 4 and not unsafe


def test_a_tokenizer_or_config_with_code_of_its_own_is_one_line_whatever_is_on_stdin(tmp_path, monkeypatch):
    """`yes |` runs nothing."""
    source, ran = tmp_path / "source", tmp_path / "ran"
    source.mkdir()
    (source / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    entries = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}
    (source / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": entries}))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": entries}))
    read, write = os.pipe()
    os.write(write, b"yes\n" * 100)
    os.close(write)
    with os.fdopen(read) as answers, monkeypatch.context() as context:
        context.setattr(sys, "stdin", answers)
        for kind in ("AutoConfig", "AutoTokenizer"):
            assert "needs Python code of its own" in refusal(load_pretrained, kind, source)
        assert "needs Python code of its own" in refusal(save_tokenizer, str(source), tmp_path / "tokenizer")
        assert not ran.exists() and answers.read() == "yes\n" * 100
    assert not (tmp_path / "tokenizer").exists()
