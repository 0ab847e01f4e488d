"""A finished data set as the tools open it: by its folder alone, without a recipe."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pretraining.data.manifest import MANIFEST_NAME, read_manifest
from pretraining.data.tools.documents import SplitDocuments
from pretraining.errors import UserError, nearest
from pretraining.recipe.data import source_name

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class FinishedData:
    """A folder whose manifest says that it is complete."""

    folder: Path
    manifest: dict

    @property
    def tokenizer_folder(self) -> Path:
        """Where tokenizer.json lies."""
        return self.folder / "tokenizer"

    def decoder(self) -> "tokenizers.Tokenizer":
        """The tokenizer that turns tokens back into text; UserError where its file is missing or damaged."""
        from tokenizers import Tokenizer

        path = self.tokenizer_folder / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exceptions
            raise UserError(f"{path}: missing or damaged ({error}); copy it again") from error

    @property
    def split_names(self) -> list[str]:
        """train before validation."""
        return list(self.manifest["splits"])

    def split(self, name: str) -> SplitDocuments:
        """The documents of one split; UserError for a name it has not, or a shard that is missing or cut."""
        if name not in self.manifest["splits"]:
            raise UserError(
                f"{self.folder}: no split {name!r}{nearest(name, self.split_names)}; "
                f"it has {', '.join(self.split_names)}"
            )
        entry = self.manifest["splits"][name]
        return SplitDocuments(self.folder, name, entry, source_names(self.manifest))


def open_finished(folder: Path) -> FinishedData:
    """Open the data set in `folder`; UserError where there is none, or an unfinished one."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; a data set is made from a recipe, that of data/python-stdlib by: "
            "python data_prep.py --recipe tiny"
        )
    manifest = read_manifest(folder)
    if manifest is None:
        inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST_NAME}"))
        advice = f"data sets inside it: {', '.join(inside)}" if inside else "run data_prep.py to its end"
        raise UserError(f"{folder}: no {MANIFEST_NAME}: this is not a finished data set; {advice}")
    return FinishedData(folder, manifest)


def source_names(manifest: dict) -> list[str]:
    """What to call each source: its own name, else the last part of its path or data set name; all differ."""
    specs = manifest["data"].get("sources") or [{}] * len(manifest["sources"])
    names: list[str] = []
    for number, (entry, spec) in enumerate(zip(manifest["sources"], specs, strict=True)):
        name = entry.get("name") or (source_name(spec) if spec else f"source {number}")
        names.append(f"{name} ({number})" if name in names else name)
    return names
