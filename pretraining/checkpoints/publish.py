"""Publish the export of a run, with its report, to the hub, a store or a folder."""

import argparse
import json
import os
from pathlib import Path

from pretraining.checkpoints.folders import files_in
from pretraining.checkpoints.format import file_entry
from pretraining.checkpoints.remote import RemoteRun
from pretraining.data.tools.push import check_repo_id, hub_refusal
from pretraining.errors import UserError, require
from pretraining.outside.addresses import is_remote, refuse_credentials, refuse_slips
from pretraining.outside.files import inside, parse_json
from pretraining.outside.schema import check, listed, read_json
from pretraining.planning.quantities import num_bytes
from pretraining.runtime.run_folder import RunFolder

LIST, BEGUN = "published.json", "published.partial.json"
"""File that names all others with their sizes and checksums. It comes last: if it is there, they are complete.
Before them comes one of their names alone."""


class Push:
    """Publish the export of a finished run, with its report.

    The destination is a model repository of the hub (OWNER/NAME), an address (s3://bucket/folder) or a folder, which
    begins with / or a dot. What is there already is not sent again. In a store and in a folder, published.json comes
    last and names every file with its checksum.
    """

    EXAMPLES = """  python -m pretraining.checkpoints push runs/tiny my-name/tiny --dry_run
  python -m pretraining.checkpoints push runs/tiny my-name/tiny --private
  python -m pretraining.checkpoints push runs/tiny ./published/tiny"""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run")
        parser.add_argument("to", metavar="OWNER/NAME|ADDRESS|FOLDER", help="where it is published")
        parser.add_argument("--private", action="store_true", help="a new repository of the hub is private")
        parser.add_argument("--dry_run", action="store_true", help="list the files, and send nothing")

    def answer(self, options: argparse.Namespace) -> dict:
        """Return {"to", "files", "bytes", "sent": the names of files that were not there, "url"}."""
        run, to = RunFolder(options.run), options.to
        run.exported()
        # the card and the report repeat the recipe, which may be older than its own refusal
        if run.recipe.exists():
            refuse_credentials(read_json(run.recipe), str(run.recipe))
        files = {str(path.relative_to(run.export)): path for path in files_in(run.export)}
        files |= {run.report.name: run.report} if run.report.is_file() else {}
        size = sum(path.stat().st_size for path in files.values())
        found = {"to": to, "files": len(files), "bytes": size, "names": sorted(files)}
        at_hub = is_at_hub(to)
        if options.dry_run:
            return {**found, "sent": [], "url": None}
        return found | (to_hub(files, to, options.private) if at_hub else to_store(files, to))

    def as_text(self, answer: dict) -> str:
        head = f"{answer['files']} files, {num_bytes(answer['bytes'])}"
        if answer["url"] is None:
            return "\n".join([f"would publish {head}, to {answer['to']}", *answer["names"]])
        return f"{head}: {answer['url']} ({len(answer['sent'])} sent)"


def is_at_hub(to: str) -> bool:
    """Return whether `push` sends to a repository of the hub; `UserError` for a place that cannot be."""
    refuse_slips(to, "push")
    if not (is_remote(to) or to.startswith(("/", ".", "~"))):
        check_repo_id(to)
        return True
    if not is_remote(to) and os.path.lexists(to) and not Path(to).is_dir():
        raise UserError(f"push: {to}: is no folder; choose another place")
    return False


def to_hub(files: dict[str, Path], repo_id: str, private: bool) -> dict:
    """Send the files to a model repository of the hub in one commit."""
    hub, errors = require("huggingface_hub", "push"), require("huggingface_hub.errors", "push")
    api, operations = hub.HfApi(), [hub.CommitOperationAdd(name, str(path)) for name, path in files.items()]
    try:
        # huggingface_hub 2.4.0: None leaves it to the default of the owner, False would make it public
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
        # one commit: nobody sees half of a model
        api.create_commit(repo_id, operations=operations, commit_message="Export and report of a run")
    except (OSError, errors.HTTPError, errors.LocalTokenNotFoundError) as error:
        raise hub_refusal(error, repo_id) from error
    return {"sent": sorted(files), "url": str(url)}


def to_store(files: dict[str, Path], address: str) -> dict:
    """Write the files to a store or a folder; those that are there with the same content are not sent again."""
    place = address if is_remote(address) else str(Path(address).expanduser().absolute())
    store = RemoteRun(place)
    entries = {name: file_entry(path) for name, path in files.items()}
    try:
        # that of an interrupted one vouches for nothing, but says that the files are ours
        kept = store.read_if_there(LIST) or store.read_if_there(BEGUN)
        known = check(parse_json(kept or "{}"), {"type": "object"}, LIST)
        for each in known:
            inside(Path(), each)  # what it names and we do not have is removed
    except (ValueError, UserError) as error:
        raise UserError(f"{store.where(LIST)}: no list of what was published ({error}); remove it") from None
    if kept is None and (theirs := sorted((store.sizes("") or {}).keys() & files.keys())):
        what = f"{listed(theirs, ', ')} would be written over, and nothing was published there before"
        raise UserError(f"{place}: {what}; choose another place, or remove what is there")
    changed = [name for name in files if known.get(name) != entries[name]]
    if changed or known.keys() != entries.keys():
        store.write_bytes(BEGUN, json.dumps(dict.fromkeys({**known, **entries})).encode())
        store.remove(LIST)  # the list must not vouch for files that are about to change
        for each in changed:
            store.write_file(each, files[each])
        for each in known.keys() - entries.keys():
            store.remove(each)
        store.write_bytes(LIST, json.dumps(entries, indent=2).encode())
        store.remove(BEGUN)
    return {"sent": changed, "url": place}
