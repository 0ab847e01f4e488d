"""`push`: upload a data set to the Hugging Face hub, the shards first and the manifest last."""

from pathlib import Path

from pretraining.data.manifest import MANIFEST_NAME, source_entries
from pretraining.data.tools.finished import FinishedData, open_finished, source_names
from pretraining.data.tools.verify import damaged, verify_data
from pretraining.errors import UserError, require
from pretraining.outside.addresses import refuse_credentials

CARD_NAME = "README.md"
LOGIN = "run `hf auth login` or set HF_TOKEN to a token that may write there"
AGAIN = "run the same command again; it goes on where it stopped"


def plan_push(folder: Path, repo_id: str) -> dict:
    """List what would be uploaded: {"repo_id", "files": {path: bytes}, "size", "card"}; nothing is sent."""
    # Without the network: a wrong name is reported before the shards are listed.
    check_repo_id(repo_id)
    data = open_finished(folder)
    # it may be older than the refusal in recipes
    refuse_credentials(data.manifest, str(folder / MANIFEST_NAME))
    card = _data_card(data.manifest, repo_id)
    files = {path: _size_of(folder / path, folder) for path in _shard_files(data)}
    files[CARD_NAME] = len(card.encode())
    files[MANIFEST_NAME] = (folder / MANIFEST_NAME).stat().st_size
    return {
        "folder": str(folder),
        "repo_id": repo_id,
        "files": files,
        "size": sum(files.values()),
        "card": card,
    }


def _shard_files(data: FinishedData) -> list[str]:
    """List all files of the data set but the manifest: shards, their JSON files, the tokenizer."""
    found = ["dataset_dict.json"]
    for name in data.split_names:
        listed = [entry["file"] for entry in data.split(name).entries]
        found += [f"{name}/{file}" for file in (*listed, "state.json", "dataset_info.json")]
    beside = [f"tokenizer/{path.name}" for path in data.tokenizer_folder.glob("*") if path.is_file()]
    # Listed even if it is missing, so that the plan names it.
    return found + sorted({"tokenizer/tokenizer.json", *beside})


def _size_of(path: Path, folder: Path) -> int:
    if not path.is_file():
        raise damaged(path, "missing", folder)
    return path.stat().st_size


def push_data(folder: Path, repo_id: str, private: bool = False, show_progress: bool = False) -> dict:
    """Verify the data set, upload it to the data set repository `repo_id`, and say where it is.

    The shards and the tokenizer go first. The last commit adds the card and the manifest, and removes the shards of an
    earlier push. After an interrupt the same command goes on where it stopped.
    """
    hub = require("huggingface_hub", "push")
    errors = require("huggingface_hub.errors", "push")
    plan = plan_push(folder, repo_id)
    # Before anything is sent: a damaged shard must not replace a good one on the hub.
    verify_data(folder, show_progress)
    api = hub.HfApi()
    try:
        return {**_summary(plan), "url": _upload(hub, api, folder, plan, private)}
    except (OSError, errors.HTTPError, errors.LocalTokenNotFoundError) as error:
        raise hub_refusal(error, repo_id) from error


def check_repo_id(repo_id: str) -> None:
    """Raise UserError for a text that names no repository of the hub."""
    hub = require("huggingface_hub.utils", "push")
    try:
        hub.validate_repo_id(repo_id)
    except hub.HFValidationError as error:
        reason = str(error).partition(". ")[0]
        raise UserError(f"push: {repo_id!r} is not a repository name ({reason}); give OWNER/NAME") from error


def _upload(hub, api, folder: Path, plan: dict, private: bool) -> str:
    repo = {"repo_id": plan["repo_id"], "repo_type": "dataset"}
    # huggingface_hub 2.4.0: None leaves it to the default of the owner, False would make it public.
    url = api.create_repo(**repo, private=private or None, exist_ok=True)
    folders = {path.partition("/")[0] for path in plan["files"] if "/" in path}
    # Everything but the card and the manifest.
    first = ["dataset_dict.json", *sorted(f"{name}/*" for name in folders)]
    message = f"Shards of {folder.name}"
    api.upload_folder(**repo, folder_path=folder, allow_patterns=first, commit_message=message)
    stale = [path for path in api.list_repo_files(**repo) if _is_shard(path) and path not in plan["files"]]
    last = [
        hub.CommitOperationAdd(CARD_NAME, plan["card"].encode()),
        hub.CommitOperationAdd(MANIFEST_NAME, (folder / MANIFEST_NAME).read_bytes()),
        *(hub.CommitOperationDelete(path) for path in stale),
    ]
    # The manifest comes last, because it says that all its shards are there.
    api.create_commit(**repo, operations=last, commit_message=f"Manifest of {folder.name}")
    return str(url)


def _is_shard(path: str) -> bool:
    # Only files that a push writes are removed: the repository may hold others.
    return path.endswith(".arrow") and path.count("/") == 1


def hub_refusal(error: Exception, repo_id: str) -> UserError:
    """Write one line about what the hub or the network refused."""
    from huggingface_hub import errors

    reason = str(error).strip().partition("\n")[0].rstrip(".: ")
    if isinstance(error, errors.LocalTokenNotFoundError):
        return UserError(f"push: {reason}; {LOGIN}")
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", None)
        # Not logged in, or no right to write there; other refusals may pass.
        advice = LOGIN if status in (401, 403) else AGAIN
        return UserError(f"push: the hub refused {repo_id}: {reason}; {advice}")
    return UserError(f"push: the hub cannot be reached ({reason}); {AGAIN}")


def _summary(plan: dict) -> dict:
    return {**plan, "files": len(plan["files"]), "card": CARD_NAME}


def plan_text(plan: dict) -> str:
    """Format the plan for a reader: files with their bytes, then the card."""
    lines = [f"{size:>16,}  {path}" for path, size in plan["files"].items()]
    head = f"would upload {len(plan['files']):,} files, {plan['size']:,} bytes, to the data set {plan['repo_id']}"
    note = f"{MANIFEST_NAME} goes up as it is, with the paths and names of the sources"
    return "\n".join([head, *lines, note, "", plan["card"]])


# README.md of a published data set, written from its manifest alone.


def _data_card(manifest: dict, repo_id: str) -> str:
    """Write the card of `repo_id`: front matter that shows the hub the splits, counts, and how to load it."""
    return "\n".join([*_front_matter(manifest), "", *_body(manifest), "", *_loading(manifest, repo_id), ""])


def _front_matter(manifest: dict) -> list[str]:
    lines = [
        "---",
        "tags:",
        "- pretraining",
        "- tokenized",
        "configs:",
        "- config_name: default",
        "  data_files:",
    ]
    for split in manifest["splits"]:
        lines += [f"  - split: {split}", f"    path: {split}/*.arrow"]
    return [*lines, "---"]


def _body(manifest: dict) -> list[str]:
    info = manifest["tokenizer"]
    lines = [
        f"# {manifest['name']}",
        "",
        "Tokenized documents for pretraining. A row is a document: `input_ids` (its tokens and the end-of-text token "
        "that closes it) and `num_bytes` (the UTF-8 length of its text). No sequence length is cut in.",
        "",
        *_table("split", {name: _counts(entry, "bytes") for name, entry in manifest["splits"].items()}),
        "",
    ]
    sources = zip(source_names(manifest), source_entries(manifest), strict=True)
    lines += _table("source", {name: _counts(entry, "text_bytes") for name, entry in sources})
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in manifest["skipped"].items())
    return [
        *lines,
        "",
        f"- tokenizer: {info['vocab_size']:,} ids, end of text `{info['eos_token']}` ({info['eos_token_id']}), "
        f"in [tokenizer/](tokenizer); fingerprint `{info['fingerprint']}`",
        f"- fingerprint of the tokens: `{manifest['fingerprint']}`",
        f"- documents left out: {left_out}",
    ]


def _counts(entry: dict, bytes_key: str) -> tuple[int, int, int]:
    return entry.get("documents", 0), entry.get("tokens", 0), entry.get(bytes_key, 0)


def _table(what: str, rows: dict[str, tuple[int, int, int]]) -> list[str]:
    lines = [f"| {what} | documents | tokens | bytes of text |", "|---|---:|---:|---:|"]
    return lines + [f"| {name} | {d:,} | {t:,} | {b:,} |" for name, (d, t, b) in rows.items()]


def _loading(manifest: dict, repo_id: str) -> list[str]:
    name = manifest["name"]
    return [
        "## Loading",
        "",
        "```python",
        "from datasets import load_dataset",
        "from transformers import AutoTokenizer",
        "",
        f'dataset = load_dataset("{repo_id}", split="train", streaming=True)',
        "```",
        "",
        "The whole folder, as it was prepared:",
        "",
        "```python",
        "from datasets import load_from_disk",
        "from huggingface_hub import snapshot_download",
        "",
        f'folder = snapshot_download("{repo_id}", repo_type="dataset", local_dir="data/{name}")',
        "splits = load_from_disk(folder)",
        'tokenizer = AutoTokenizer.from_pretrained(f"{folder}/tokenizer")',
        "```",
        "",
        f"`python -m pretraining.data verify data/{name}` then compares every shard with its checksum.",
    ]
