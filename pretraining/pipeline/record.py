"""Keep what a pipeline has done, in `pipeline.json` of the run folder, and name files by their content."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretraining.checkpoints.format import file_entry
from pretraining.data.checksums import digest_of
from pretraining.outside.files import read_json_value
from pretraining.runtime.durable_files import write_json
from pretraining.runtime.run_folder import RunFolder, utc_now


class Record:
    """What each step took and made when it ran last."""

    def __init__(self, run: RunFolder):
        self.path = run.pipeline
        self.steps, self.files = self._read()

    def _read(self) -> tuple[dict[str, dict], dict[str, dict]]:
        try:
            kept = read_json_value(self.path)
            return dict(kept["steps"]), dict(kept["files"])
        # none yet, or another file of that name: then every step looks at what is there
        except (OSError, ValueError, KeyError, TypeError):
            return {}, {}

    def add(self, step: str, entry: Mapping[str, Any]) -> None:
        """Keep what a step has done; the whole record is written, also into a folder that has replaced the old one."""
        self.steps[step] = {**entry, "time": utc_now()}
        write_json(self.path, {"steps": self.steps, "files": self.files})

    def content(self, name: str, files: Mapping[str, Path]) -> str | None:
        """Compute the digest of the content of files; None if one is missing.

        Size and time of each only say whether it must be read again.

        name: under which the digest is kept.
        """
        try:
            found = {each: path.stat() for each, path in sorted(files.items())}
        except FileNotFoundError:
            return None
        states = digest_of([(each, stat.st_size, stat.st_mtime_ns) for each, stat in found.items()])
        known = self.files.get(name)
        if known is None or known.get("states") != states:
            entries = {each: file_entry(files[each]) for each in found}
            known = self.files[name] = {"states": states, "content": digest_of(entries)}
        return known["content"]
