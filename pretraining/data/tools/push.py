"""`push`: upload a data set to the Hugging Face hub, the shards first and the manifest last."""

from pathlib import Path

from pretraining.data.finished import damaged, open_finished, source_names, verify_data
from pretraining.data.manifest import MANIFEST_NAME, POSITIONS_FILE, source_entries
from pretraining.errors import UserError, reason_of
from pretraining.outside.addresses import refuse_credentials

CARD_NAME = "README.md"
LOGIN = "run `hf auth login` or set HF_TOKEN to a token that may write there"
AGAIN = "run the same command again; it goes on where it stopped"


def plan_push(folder: Path, repo_id: str) -> dict:
    """List what would be uploaded: {"repo_id", "files": {path: bytes}, "size", "card"}; nothing is sent."""
    # Without the network: a wrong name is reported before the shards are listed.
    check_repo_id(repo_id)
    data = open_finished(folder)
    manifest = data.manifest
    # it may be older than the refusal in recipes
    refuse_credentials(manifest, str(folder / MANIFEST_NAME))
    sources = dict(zip(source_names(manifest), source_entries(manifest), strict=True))
    card = CARD.format(
        repo_id=repo_id,
        name=manifest["name"],
        split_files="\n".join(f"  - split: {name}\n    path: {name}/*.arrow" for name in data.split_names),
        splits=_table("split", manifest["splits"], "bytes"),
        sources=_table("source", sources, "text_bytes"),
        tokenizer=manifest["tokenizer"],
        fingerprint=manifest["fingerprint"],
        left_out=", ".join(f"{count:,} {reason}" for reason, count in manifest["skipped"].items()),
    )
    paths = ["dataset_dict.json", *([POSITIONS_FILE] if "validation_positions" in manifest else [])]
    for name in data.split_names:
        listed = [entry["file"] for entry in data.split(name).shard_entries]
        paths += [f"{name}/{file}" for file in (*listed, "state.json", "dataset_info.json")]
    beside = [f"tokenizer/{path.name}" for path in data.tokenizer_folder.glob("*") if path.is_file()]
    # The tokenizer even if it is missing, so that this is noticed.
    paths += sorted({"tokenizer/tokenizer.json", *beside})
    if missing := next((path for path in paths if not (folder / path).is_file()), None):
        raise damaged(folder / missing, "missing", folder)
    files = {path: (folder / path).stat().st_size for path in paths}
    files |= {CARD_NAME: len(card.encode()), MANIFEST_NAME: (folder / MANIFEST_NAME).stat().st_size}
    size = sum(files.values())
    return {"folder": str(folder), "repo_id": repo_id, "files": files, "size": size, "card": card}


def push_data(folder: Path, repo_id: str, private: bool = False, show_progress: bool = False) -> dict:
    """Verify the data set, upload it to the data set repository `repo_id`, and say where it is.

    The shards and the tokenizer go first. The last commit adds the card and the manifest, and removes the shards of an
    earlier push. After an interrupt the same command goes on where it stopped.
    """
    import huggingface_hub as hub
    from huggingface_hub import errors

    plan = plan_push(folder, repo_id)
    # Before anything is sent: a damaged shard must not replace a good one on the hub.
    verify_data(folder, show_progress)
    api, repo = hub.HfApi(), {"repo_id": repo_id, "repo_type": "dataset"}
    try:
        # huggingface_hub 2.4.0: None leaves it to the default of the owner, False would make it public.
        url = api.create_repo(**repo, private=private or None, exist_ok=True)
        # Everything but the card and the manifest, a pattern for each folder.
        tops = (path.partition("/") for path in plan["files"])
        first = sorted(
            {f"{top}{slash}*" if slash else top for top, slash, _ in tops} - {CARD_NAME, MANIFEST_NAME}
        )
        message = f"Shards of {folder.name}"
        api.upload_folder(**repo, folder_path=folder, allow_patterns=first, commit_message=message)
        # Only files that a push writes are removed: the repository may hold others.
        there = api.list_repo_files(**repo)
        shards = [path for path in there if path.endswith(".arrow") and path.count("/") == 1]
        last = [
            hub.CommitOperationAdd(CARD_NAME, plan["card"].encode()),
            hub.CommitOperationAdd(MANIFEST_NAME, (folder / MANIFEST_NAME).read_bytes()),
            *(hub.CommitOperationDelete(path) for path in shards if path not in plan["files"]),
        ]
        # The manifest comes last, because it says that all its shards are there.
        api.create_commit(**repo, operations=last, commit_message=f"Manifest of {folder.name}")
        return {**plan, "files": len(plan["files"]), "card": CARD_NAME, "url": str(url)}
    except (OSError, errors.HTTPError, errors.LocalTokenNotFoundError) as error:
        raise hub_refusal(error, repo_id) from error


def check_repo_id(repo_id: str) -> None:
    """Raise UserError for a text that names no repository of the hub."""
    from huggingface_hub import utils

    try:
        utils.validate_repo_id(repo_id)
    except utils.HFValidationError as error:
        reason = str(error).partition(". ")[0]
        raise UserError(f"push: {repo_id!r} is not a repository name ({reason}); give OWNER/NAME") from error


def hub_refusal(error: Exception, repo_id: str) -> UserError:
    """Write one line about what the hub or the network refused."""
    from huggingface_hub import errors

    reason = reason_of(error).rstrip(".: ")
    if isinstance(error, errors.LocalTokenNotFoundError):
        return UserError(f"push: {reason}; {LOGIN}")
    if not isinstance(error, errors.HfHubHTTPError):
        return UserError(f"push: the hub cannot be reached ({reason}); {AGAIN}")
    # Not logged in, or no right to write there; other refusals may pass.
    advice = LOGIN if getattr(error.response, "status_code", None) in (401, 403) else AGAIN
    return UserError(f"push: the hub refused {repo_id}: {reason}; {advice}")


CARD = """\
---
tags:
- pretraining
- tokenized
configs:
- config_name: default
  data_files:
{split_files}
---

# {name}

Tokenized documents for pretraining. A row is a document: `input_ids` (its tokens and the end-of-text token that \
closes it) and `num_bytes` (the UTF-8 length of its text). No sequence length is cut in.

{splits}

{sources}

- tokenizer: {tokenizer[vocab_size]:,} ids, end of text `{tokenizer[eos_token]}` ({tokenizer[eos_token_id]}), in \
[tokenizer/](tokenizer); fingerprint `{tokenizer[fingerprint]}`
- fingerprint of the tokens: `{fingerprint}`
- documents left out: {left_out}

## Loading

```python
from datasets import load_dataset
from transformers import AutoTokenizer

dataset = load_dataset("{repo_id}", split="train", streaming=True)
```

The whole folder, as it was prepared:

```python
from datasets import load_from_disk
from huggingface_hub import snapshot_download

folder = snapshot_download("{repo_id}", repo_type="dataset", local_dir="data/{name}")
splits = load_from_disk(folder)
tokenizer = AutoTokenizer.from_pretrained(f"{{folder}}/tokenizer")
```

`python -m pretraining.data verify data/{name}` then compares every shard with its checksum.
"""
"""README.md of a published data set. Its front matter shows the hub the splits."""


def _table(what: str, rows: dict[str, dict], bytes_key: str) -> str:
    lines = [f"| {what} | documents | tokens | bytes of text |", "|---|---:|---:|---:|"]
    for name, entry in rows.items():
        documents, tokens, num_bytes = (entry.get(key, 0) for key in ("documents", "tokens", bytes_key))
        lines.append(f"| {name} | {documents:,} | {tokens:,} | {num_bytes:,} |")
    return "\n".join(lines)
