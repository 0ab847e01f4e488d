"""Describe a preparation: its stages in order, everything its tasks need to know, on any machine, and how far it is.

If it takes only the first documents of a source, the task in which this portion ends is run up to its end and no
further. All tasks before it are run whole, and none behind it. So what is prepared depends on the sources and the
portion alone: not on the order of work, and not on what smaller portions were prepared before.
"""

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import filterfalse
from pathlib import Path
from typing import NamedTuple

from pretraining.data.checksums import digest_of
from pretraining.data.corpus import CLEANING_KEYS, PIECE_BYTES, TASK_PIECES, Corpus, HubSource, TextSource
from pretraining.data.dedup.decontamination import fingerprint_of_sets
from pretraining.data.manifest import consulted, deciding_section
from pretraining.data.portions import Portion
from pretraining.data.preparation import cleaning
from pretraining.data.preparation.stage import Stage
from pretraining.data.preparation.tokenizing import ALL, MakeTokenizer, Texts, Tokenize, TokenizeValidation
from pretraining.data.publishing import work_folder
from pretraining.errors import UserError
from pretraining.extend import read_extensions
from pretraining.recipe.data import Data
from pretraining.recipe.recipe import Recipe
from pretraining.runtime.durable_files import replacing, replacing_folder

STATE_NAME = "preparation.json"
FORM = 2
"""Of this file, which jobs of a cluster read that another version may have submitted."""

FEWEST_TOKEN_BYTES = 2
"""Bytes of text in a token, at least, as is assumed until a task is finished."""

SURE_SHARE = 0.9
"""Share of the tasks that seem to be needed, which are started at once; the last ones are awaited one by one."""


class SourceSurvey(NamedTuple):
    """How far the tasks of one source have come towards its target."""

    used: list[int]
    """Finished ones that the target needs, in their order, behind those that were begun with."""
    bounds: dict[int, Portion]
    """The task in which the target ends, if it is known."""
    missing: list[int]
    """Those to run next; none: the source is finished."""


class Survey(list[SourceSurvey]):
    """Those of all sources."""

    @property
    def missing(self) -> list[int]:
        return [number for source in self for number in source.missing]


@dataclass(frozen=True)
class Preparation:
    """The data section of a recipe, its texts cut into pieces, and the stages that make them a data set."""

    folder: Path
    """Where the finished data set goes."""
    data: Data
    vocab_size: int | None
    """The model's vocabulary size; None if there is no model to fit."""
    sequence_length: int
    corpus: Corpus
    validation: Corpus | None
    """The texts of `data.validation`."""
    fingerprints: list[dict]
    """What each source is, those of validation last, for the manifest."""
    targets: list[Portion | None]
    """How much to prepare of each source; None: all of it."""
    begun: list[dict]
    """What `folder` holds of each source already, to go on from: "begun" of its manifest's entry; {}: nothing."""
    consulted: dict
    """What filters and decontamination use, as it was at the beginning."""
    evaluation_sets: str | None
    """Their fingerprint, if there are such."""
    extensions: tuple[str, ...] = ()
    """Absolute paths or names of the user's modules that define filters."""
    bounds: dict[int, Portion] = field(default_factory=dict)
    """The tasks of `tokenize` of which only a part is wanted."""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        sources: list[TextSource],
        folder: Path,
        fingerprints: list[dict],
        targets: list[Portion | None] | None = None,
        earlier: dict | None = None,
    ) -> "Preparation":
        """Plan the preparation of a recipe's data; to cut the opened sources, it may read their files' footers.

        earlier: the manifest in `folder` of the same data, of which there is less; the preparation goes on from there.
        """
        data, of_training = recipe.data, len(recipe.data.sources)
        # Of a hub that is silent, what was prepared before is assumed, and read.
        found = zip(sources, fingerprints, strict=True)
        sources = [replace(s, identity=f) if isinstance(s, HubSource) else s for s, f in found]
        corpus, begun = Corpus.of(data, sources[:of_training]), [{}] * of_training
        own = Corpus.of(data, sources[of_training:], data.validation.sources) if data.validation else None
        # other modules may import torch, for which no worker should wait
        filtering = [each for each in recipe.extensions if each.defines.get("filter")]
        named = tuple(str(each.path.absolute()) if each.is_file else each.module for each in filtering)
        vocab_size, length = recipe.model.vocab_size, recipe.sequence_length
        targets = targets or [None] * of_training
        sets = data.decontaminate and fingerprint_of_sets(data.decontaminate.folder, data.decontaminate.tasks)
        known = (fingerprints, targets, begun, consulted(data.to_dict()), sets)
        planned = cls(folder, data, vocab_size, length, corpus, own, *known, named)
        if earlier is None:
            return planned
        begun = [each.get("begun", {}) for each in earlier["sources"]]
        for source, each in enumerate(begun):
            # There may be none, or the tasks were cut otherwise.
            if not each.get("tasks") or each["keys"] != digest_of(planned.keys_of(source)[: each["tasks"]]):
                begun[source] = {}
        return replace(planned, begun=begun)

    def tasks_of(self, source: int) -> list[int]:
        """List the tasks of `tokenize` that read a source of training."""
        pieces, tasks = self.texts.pieces, enumerate(self.texts.tasks)
        return [number for number, task in tasks if pieces[task.start].source == source]

    def keys_of(self, source: int) -> list[list[str]]:
        tasks = [self.texts.tasks[number] for number in self.tasks_of(source)]
        return [self.texts.keys[task.start : task.stop] for task in tasks]

    @property
    def goes_on(self) -> bool:
        return any(self.begun)

    @property
    def work(self) -> Path:
        return work_folder(self.folder)

    @cached_property
    def stages(self) -> list[Stage]:
        """List the stages in order; each may use the outputs of those before."""
        own, before = self.tokenize_validation, self.cleaned.stages if self.cleaned else []
        if own and isinstance(own.texts, cleaning.CleanedCorpus):
            before = [*before, *own.texts.stages]
        return [*before, self.tokenize.tokenizer, self.tokenize, *([own] if own else [])]

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    @cached_property
    def origin(self) -> str:
        """Identify the tokens by all that decides them, once the tokenizer is there and before the tokens are."""
        made_by = self.tokenize.tokenizer.info.fingerprint
        return digest_of(deciding_section(self.data.to_dict()), self.fingerprints, self.consulted, made_by)

    @property
    def texts(self) -> Texts:
        return self.cleaned or self.corpus

    @cached_property
    def cleaned(self) -> cleaning.CleanedCorpus | None:
        """Plan what cleaning leaves of the corpus; None if the recipe asks for no cleaning."""
        data, dedup = self.data, self.data.dedup
        if dedup and not dedup.compares:
            dedup = None
        if not (dedup or data.filters or data.decontaminate):
            return None
        # For the error of an empty corpus: these keys may have left nothing.
        cleaned_by = [key for key in CLEANING_KEYS if getattr(data, key)]
        sets = None
        if asked := data.decontaminate:
            sets = cleaning.EvaluationSets(self.work, asked, self.evaluation_sets, data, self.validation)
        names = tuple(spec.called for spec in data.sources)
        clean = cleaning.Clean(self.work, self.corpus, data.filters, self.consulted, sets, dedup, names)
        # Documents are compared across the whole corpus; else no more is cleaned than is wanted, and no task waits for
        # text behind it. What goes on after such a portion is counted in the same way.
        if not dedup and (any(self.targets) or data.shuffle_blocks or self.goes_on):
            return cleaning.CleanedCorpus(cleaned_by, clean, as_read=True)
        fates, passages, share = None, None, data.validation_share
        if dedup:
            fates = cleaning.Fates(self.work, cleaning.Match(self.work, clean), dedup.remove, share)
            passages = dedup.passages and cleaning.Passages(self.work, fates, dedup.passages)
        return cleaning.CleanedCorpus(cleaned_by, clean, fates, share, passages=passages)

    @cached_property
    def tokenize(self) -> Tokenize:
        """Plan the last stage, and with it the stage that makes the tokenizer."""
        data, share = self.data, self.data.validation_share
        made_for = (data.tokenizer, self.vocab_size, share, data.borders)
        tokenizer = MakeTokenizer(self.work, self.texts, *made_for)
        return Tokenize(self.work, self.texts, tokenizer, data.encoder, share, self.bounds)

    @cached_property
    def tokenize_validation(self) -> TokenizeValidation | None:
        """Plan the stage for the texts of `data.validation`, if there are any."""
        if self.validation is None:
            return None
        texts: Texts = self.validation
        specs = self.data.validation.sources
        bounds = {
            number: Portion(spec.max_tokens, spec.max_documents)
            for number, task in enumerate(texts.tasks)
            if (spec := specs[texts.pieces[task.start].source]).is_capped
        }
        if self.data.validation.filters and self.data.filters:
            rules = {key: rule for key, rule in self.consulted.items() if key.startswith("data.filters")}
            names = tuple(spec.called for spec in specs)
            made_of = (self.validation, self.data.filters, rules, None, None, names)
            clean = cleaning.CleanValidation(self.work, *made_of)
            # No more is cleaned than is wanted.
            texts = cleaning.CleanedCorpus(["filters"], clean, None, ALL, as_read=bool(bounds))
        return TokenizeValidation(self.work, texts, self.tokenize.tokenizer, self.data.encoder, ALL, bounds)

    def survey(self) -> Survey:
        """Look which tasks of `tokenize` the target of each source needs, and which of them are to run next."""
        surveys = Survey()
        for source, (target, begun) in enumerate(zip(self.targets, self.begun, strict=True)):
            # Nobody knows how much a file of the hub holds.
            large = self.corpus.sources[source].large_pieces
            most = None if large else PIECE_BYTES * TASK_PIECES // FEWEST_TOKEN_BYTES
            numbers = self.tasks_of(source)[begun.get("tasks", 0) :]
            surveys.append(self._survey_source(numbers, target, begun, most))
        return surveys

    def _survey_source(
        self, numbers: list[int], target: Portion | None, begun: dict, most_tokens: int | None
    ) -> SourceSurvey:
        """Look how far these tasks of a source have come; most_tokens: of a task, while none is finished."""
        whole = replace(self.tokenize, bounds={})

        def finished(number: int) -> bool:
            return whole.folder(number).is_dir()

        if target is None:
            return SourceSurvey([*filter(finished, numbers)], {}, [*filterfalse(finished, numbers)])
        used: list[int] = []
        largest = begun.get("largest_task", 0)
        left = target.less(begun.get("documents", 0), begun.get("tokens", 0))
        for place, number in enumerate(numbers):
            bounded = replace(whole, bounds={number: left})
            if bounded.folder(number).is_dir():
                if bounded.result(number)["cut"]:
                    return SourceSurvey([*used, number], {number: left}, [])
                # It ended before its bound: it is complete, whatever the bound was.
                bounded.folder(number).rename(whole.folder(number))
            if finished(number):
                train = whole.result(number)["splits"]["train"]
                if left.is_reached(train["documents"], train["tokens"]):
                    return SourceSurvey(used, {number: left}, [number])
                used.append(number)
                largest, left = max(largest, train["tokens"]), left.less(train["documents"], train["tokens"])
                continue
            # Of the next tasks, those that are needed whole if none has more tokens than the largest.
            most = largest or most_tokens
            by_tokens_alone = left.tokens is not None and left.documents is None
            sure = int(SURE_SHARE * left.tokens / most) if by_tokens_alone and most else 1
            if sure > 1:
                return SourceSurvey(used, {}, [*filterfalse(finished, numbers[place : place + sure])])
            return SourceSurvey(used, {number: left}, [number])
        return SourceSurvey(used, {}, [])

    def bounded(self, survey: Survey) -> "Preparation":
        """Return the same preparation, whose tasks end where a survey says that the targets end."""
        bounds = {number: bound for source in survey for number, bound in source.bounds.items()}
        return replace(self, bounds=bounds)

    def reuse_tokenizer(self) -> None:
        """Take the tokenizer of the data set that the preparation goes on from: it need not be made again."""
        stage, there = self.tokenize.tokenizer, self.folder / "tokenizer"
        if self.goes_on and there.is_dir() and stage.pending():
            with replacing_folder(stage.folder(0)) as part:
                shutil.copytree(there, part)

    def save(self) -> None:
        """Write the preparation to the work folder, for tasks in other processes."""
        values = {"form": FORM, **asdict(self), "data": self.data.to_dict()}
        with replacing(self.work / STATE_NAME) as file:
            json.dump(values, file, default=lambda v: [v.start, v.stop] if isinstance(v, range) else str(v))

    @classmethod
    def load(cls, work: Path) -> "Preparation":
        path = work / STATE_NAME
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("form", None) != FORM:
            raise UserError(f"{path}: another version of this code wrote it; run the same data_prep.py again")
        # before the filters that they define are built
        values["extensions"] = tuple(values["extensions"])
        read_extensions(values["extensions"], work, str(path))
        # The fingerprints come from the file too: all tasks use those that were found at the start.
        opened: dict = {"folder": Path(values["folder"]), "data": Data.of(values["data"])}
        opened["corpus"] = Corpus.from_json(values["corpus"])
        opened["validation"] = values["validation"] and Corpus.from_json(values["validation"])
        opened["targets"] = [target and Portion(*target) for target in values["targets"]]
        opened["bounds"] = {int(number): Portion(*bound) for number, bound in values["bounds"].items()}
        return cls(**{**values, **opened})
