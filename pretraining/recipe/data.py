"""The recipe's mixture: what its sources are called, and the shares that their weights give each stage of the run."""

from collections.abc import Iterable, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

from pretraining.errors import nearest
from pretraining.outside.schema import Wrong
from pretraining.recipe.section import TEXT, Section, described, key

END_OF_TEXT = "<|endoftext|>"
"""What closes a document, in a tokenizer that is trained here."""

TEXT_OF_CROPPED = 2
"""Tokens that are prepared for each one that a run reads of cropped documents: a third of them, or so, is left out."""

MOST_HASHES = 4096
"""Of a document's MinHash signature."""

# a context of our own: the default one could be changed by any library
_DECIMALS = Context(prec=50)
_VALUES = {"type": ["array", "null"], "minItems": 1}


class Condition(Section):
    """What a row must say beside its text to be read; one that lacks the field is left out."""

    field: str = key(minLength=1)
    """Column or JSON key; meta.language is language inside of meta."""
    at_least: float | None = key(default=None, omitted=True)
    """Least number."""
    at_most: float | None = key(default=None, omitted=True)
    """Greatest number."""
    among: list | None = key(default=None, schema=_VALUES, omitted=True)
    """Values, of which it is one."""
    not_among: list | None = key(default=None, schema=_VALUES, omitted=True)
    """Values, of which it is none."""

    def check_together(self, at: str) -> Wrong:
        """Some number is in the range."""
        if None not in (self.at_least, self.at_most) and self.at_least > self.at_most:
            yield (
                f"{at}.at_least",
                f"is {self.at_least:g}, more than {at}.at_most {self.at_most:g}: no row would be read",
            )

    def holds(self, row: dict) -> bool:
        value = row.get(self.field)
        if self.field not in row:
            value = row
            for name in self.field.split("."):
                value = value.get(name) if isinstance(value, dict) else None
        # as a recipe writes numbers: Parquet has decimals too
        value = float(value) if isinstance(value, Decimal) else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return (
            value is not None
            and (self.at_least is None or (is_number and value >= self.at_least))
            and (self.at_most is None or (is_number and value <= self.at_most))
            and (self.among is None or value in self.among)
            and (self.not_among is None or value not in self.not_among)
        )


class TextOrigin(Section):
    """Where text is read from: a path or a dataset."""

    one_of = ("path", "dataset")

    path: str | None = key(default=None, minLength=1, omitted=True)
    """A file, a folder or a glob: .txt, .jsonl(.gz, .zst), .parquet, .warc(.gz); here or at an fsspec address (s3://,
    gs://, hf://, https://)."""
    dataset: str | None = key(default=None, minLength=1, omitted=True)
    """A Hugging Face dataset name, streamed."""
    config: str | None = key(default=None, minLength=1)
    """Configuration of the dataset."""
    split: str = key(default="train", minLength=1)
    """Split of the dataset."""
    revision: str | None = key(default=None, minLength=1)
    """Commit or tag of the dataset."""
    text_column: str = key(default="text", minLength=1)
    """Column or JSON key that holds the text."""
    format: Literal["lines", "fasta"] | None = key(default=None, omitted=True)
    """How the files of path are read: a document for each line of .txt(.gz, .zst), or for the sequence of each record
    of .fasta, .fa, .faa, .fna or .ffn (.gz, .zst); left out: as their names say."""
    keep: list[Condition] | None = key(default=None, minItems=1, omitted=True)
    """Read only rows for which all of this holds."""
    name: str | None = key(default=None, minLength=1)
    """What reports and data.mixture call this source."""

    @property
    def called(self) -> str:
        return source_name(self.to_dict())


class Source(TextOrigin):
    """Where text comes from: one of builtin, path and dataset."""

    one_of = ("builtin", "path", "dataset")

    builtin: Literal["python_stdlib"] | None = key(default=None, omitted=True)
    """The text of the installed Python standard library: no network, no account."""
    weight: float | None = key(default=None, exclusiveMinimum=0)
    """Share of the training tokens relative to the other sources' weights; null for all sources: by size."""
    max_epochs: float | None = key(default=None, exclusiveMinimum=0)
    """How often the run may read this source; null: once in a mixture, without limit otherwise."""
    max_tokens: int | None = key(default=None, minimum=1, omitted=True)
    """Take the source's first documents alone: up to the one with which training has so many tokens of it."""
    max_documents: int | None = key(default=None, minimum=1, omitted=True)
    """Take the source's first documents alone: up to so many for training, beside those of validation."""


class ValidationSource(TextOrigin):
    """Text to validate on: a path or a dataset."""

    split: str = key(default="validation", minLength=1)
    """Split of the dataset."""
    max_tokens: int | None = key(default=None, minimum=1, omitted=True)
    """Take the first documents alone: up to the one with which they have so many tokens."""
    max_documents: int | None = key(default=None, minimum=1, omitted=True)
    """Take so many first documents alone."""

    @property
    def is_capped(self) -> bool:
        return (self.max_tokens, self.max_documents) != (None, None)


class OwnValidation(Section):
    """Validation on sources of its own, prepared with the rest, each measured by its name; null: on the share alone."""

    sources: list[ValidationSource] = key(minItems=1)
    """The texts, in this order, whole unless they are capped."""
    filters: bool = key(default=False)
    """Apply data.filters to them too; false: they are taken as they are."""


class MinHash(Section):
    """Near duplicates by MinHash-LSH, each candidate pair checked."""

    keeps_what_is_written = True

    ngram: int = key(default=5, minimum=1, maximum=1024)
    """Words or characters in an n-gram."""
    unit: Literal["words", "characters"] = key(default="words")
    """What an n-gram is made of."""
    threshold: float = key(default=0.8, exclusiveMinimum=0, maximum=1)
    """Jaccard similarity from which documents are near duplicates."""
    bands: int | None = key(default=None, minimum=1)
    """null: derived from threshold (32 x 8 at 0.8)."""
    rows: int | None = key(default=None, minimum=1)
    """Hashes in a band; goes with bands."""
    seed: int = key(default=0, minimum=0)
    """Picks the hash functions."""

    def check_together(self, at: str) -> Wrong:
        """Bands have rows, and not too many of them."""
        if (self.bands is None) != (self.rows is None):
            there, missing = ("bands", "rows") if self.rows is None else ("rows", "bands")
            remedy = "give both, or neither to have them follow from threshold"
            yield f"{at}.{missing}", f"is missing, and goes with {there}; {remedy}"
        if (hashes := (self.bands or 0) * (self.rows or 0)) > MOST_HASHES:
            what = f"is {self.bands}; with rows {self.rows} that is {hashes} hashes a document; at most {MOST_HASHES}"
            yield f"{at}.bands", what


class RepeatedPassages(Section):
    """Passages that occurred before, word for word (Lee et al. 2022, there 50 tokens); left out: not looked for."""

    words: int = key(default=50, minimum=5, maximum=1024)
    """Length from which a passage counts, compared as it is written; without spaces a character is a word."""
    remove: bool = key(default=True)
    """Cut them out of the texts, all but the first; false: they are counted."""


class Dedup(Section):
    """Leave out repeated documents, across all sources; the first in source order is kept."""

    exact: bool = key(default=True)
    """Drop documents whose text occurred before."""
    remove: bool = key(default=True)
    """false keeps every copy, on one side of the train/validation split."""
    minhash: MinHash | None = key(default=None)
    passages: RepeatedPassages | None = key(default=None, omitted=True)

    @property
    def compares(self) -> bool:
        """Whether texts are compared at all, for which all of them are read first."""
        return self.exact or self.minhash is not None or self.passages is not None


class Decontaminate(Section):
    """Drop documents that hold a stretch of an evaluation set."""

    folder: str | None = key(default=None, minLength=1)
    """Folder of .txt and .jsonl(.gz) evaluation sets."""
    tasks: list[str] = key(default=[], items={"minLength": 1})
    """lm-eval tasks, groups, or paths of task YAML files."""
    ngram: int = key(default=13, minimum=1, maximum=1024)
    """Words that must be shared."""
    shortest: int = key(default=8, minimum=1)
    """Shorter evaluation texts are looked for whole, down to this many words."""
    share: float = key(default=0, minimum=0, maximum=1)
    """Share of a document's n-grams that must be found; 0: any one."""
    validation: bool = key(default=False)
    """The texts of data.validation are evaluation sets too."""

    def check_together(self, at: str) -> Wrong:
        """There are evaluation sets, and none is looked for by more words than an n-gram has."""
        if self.shortest > self.ngram:
            yield f"{at}.shortest", f"is {self.shortest}, more than {at}.ngram {self.ngram}"
        if self.folder is None and not self.tasks and not self.validation:
            yield at, "names no evaluation sets; give folder or tasks, or set validation to true"


class MixtureStage(Section):
    """A part of the run with weights of its own."""

    keeps_what_is_written = True

    until: float | None = key(default=None, exclusiveMinimum=0)
    """End of the stage: a share of the run below 1, or tokens; left out in the last."""
    weights: dict | None = key(default=None)
    """Weight by source name; a source left out is not read in this stage."""


class Mixture(Section):
    """How the sources are mixed; null: by their weights, or without weights as one stream."""

    keeps_what_is_written = True

    temperature: float | None = key(default=None, minimum=1)
    """Without weights: shares go as size ** (1 / temperature)."""
    stages: list[MixtureStage] | None = key(default=None, minItems=1)
    """Weights that change during the run, in order."""


_TRAINED_TOKENIZER = {
    "train_vocab_size": described(
        "Ids of the tokenizer, special tokens included.", type="integer", minimum=257
    ),
    "min_frequency": described(
        "How often a pair must occur to be merged; left out: once.", type="integer", minimum=1
    ),
    "special_tokens": described(
        "Special tokens of your own, with the ids 1, 2, ... behind <|endoftext|>.", type="array", items=TEXT
    ),
    "split": described(
        "Where BPE may not merge: gpt2 (left out: this), gpt4, or a regular expression of the pieces of a text.",
        **TEXT,
    ),
    "units": described(
        "In place of train_vocab_size: a token for each byte, or for each character of the corpus (others are "
        "spelled in bytes).",
        enum=["bytes", "characters"],
    ),
}


class Data(Section):
    """The text, how it becomes tokens, and how much of it validates."""

    name: str = key()
    """Folder below data/ that holds the prepared tokens; recipes with equal data share it."""
    sources: list[Source] = key(minItems=1)
    """Where the text comes from, in this order."""
    tokenizer: str | dict = key(minLength=1, properties=_TRAINED_TOKENIZER, additionalProperties=False)
    """A name or path, {"train_vocab_size": N} to train byte-level BPE on the corpus, or {"units": "bytes"}."""
    borders: Literal["eos", "bos", "bos_eos"] = key(default="eos")
    """The special tokens around a document: its end of text behind it, the beginning of text before it, or both."""
    validation_share: float = key(default=0.005, minimum=0, exclusiveMaximum=1)
    """Share of the documents kept for validation, whole, by a hash of their text; 0: data.validation alone."""
    validation: OwnValidation | None = key(default=None)
    encoder: Literal["auto", "fastokens", "gigatoken", "tokenizers"] = key(default="auto")
    """What turns text into tokens; auto: the fast exact one where it fits the tokenizer, else tokenizers. The tokens
    are the same."""
    prepare: Literal["all", "budget"] = key(default="all")
    """How much of the sources is encoded: all of it, or what the budget needs of each by its share, each token once,
    and validation. A larger budget goes on from there."""
    filters: list[dict] = key(default=[], schema={})
    dedup: Dedup | None = key(default=None)
    decontaminate: Decontaminate | None = key(default=None)
    mixture: Mixture | None = key(default=None)
    shuffle_shards: int | None = key(default=None, minimum=1)
    """Shuffle inside groups of so many shards, so that a remote cache stays small; null: over the whole epoch."""
    shuffle_blocks: int | None = key(default=None, minimum=1)
    """Read the text as it comes, shuffled inside windows of so many blocks: the order that training while the data is
    prepared needs; null: over the whole epoch."""
    skip_undecodable: bool = key(default=False)
    """Skip and count text that is not UTF-8 instead of stopping at it."""
    sequence_length: int | None = key(default=None, minimum=1)
    """Tokens per sample; null: the model's positions."""
    document_masking: bool = key(default=False)
    """Attention and positions stop at the ends of documents, and no document's first token is a target."""
    packing: Literal["in_sequence", "best_fit", "cropped"] = key(default="in_sequence")
    """How documents fill blocks: one after the other; rearranged near each other so that few are cut by a block's end;
    or so that each block begins with a document, while what does not fit is cut off and left out."""

    @property
    def fewest_ids(self) -> int:
        """The ids that a tokenizer of this corpus has at least; 0 for one that has a name."""
        if isinstance(self.tokenizer, str):
            return 0
        units = 257 + len(self.tokenizer.get("special_tokens", ()))
        return self.tokenizer.get("train_vocab_size", units)

    @property
    def source_names(self) -> list[str]:
        """What the recipe calls its sources: the name, else the last part of the path or data set's name."""
        return [source.called for source in self.sources]

    @property
    def text_origins(self) -> list[tuple[str, TextOrigin]]:
        """(dotted key, entry) of all that is read: the sources, and behind them those of validation."""
        own = self.validation.sources if self.validation else []
        return [
            *((f"data.sources.{number}", source) for number, source in enumerate(self.sources)),
            *((f"data.validation.sources.{number}", source) for number, source in enumerate(own)),
        ]

    @property
    def validation_names(self) -> list[str]:
        """What a validation measures by itself: sources of the held-out share if there are several, and of validation.

        A set that is too small for one block has no number all the same.
        """
        training = self.source_names
        own = [source.called for source in self.validation.sources] if self.validation else []
        # Names that are alike, which only data without a mixture may have, tell nothing apart.
        held_out = training if self.validation_share and len(set(training)) == len(training) > 1 else []
        represents_all = len(held_out + own) > 1 and set(training) <= set(held_out or own)
        return [*held_out, *own, *(["mixture"] if is_mixed(self) and represents_all else [])]

    def unread(self, at: str) -> Iterable[str]:
        yield from super().unread(at)
        stages = (self.mixture and self.mixture.stages) or []
        if stages and all(stage.weights for stage in stages) and any(each.weight for each in self.sources):
            yield f"{at}.sources: their weights do nothing, since every stage of {at}.mixture has its own"
        if self.validation and self.validation.filters and not self.filters:
            yield f"{at}.validation.filters: does nothing without {at}.filters"
        for number, rule in enumerate(self.filters):
            named = {*(rule.get("sources") or ())}
            if named and not named & {*self.source_names} and not self.validation.filters:
                only = "is for sources of validation alone"
                yield f"{at}.filters.{number}: {only}, and does nothing without {at}.validation.filters"

    def check_together(self, at: str) -> Wrong:
        """Sources that can be read, one order, special tokens that differ, and named texts to validate on."""
        for place, source in self.text_origins:
            if source.format is not None and source.path is None:
                yield f"{place}.format", "goes with path, whose files it is about; leave it out"
            for name in ("config", "split", "revision"):
                if source.dataset is None and getattr(source, name) != getattr(type(source), name):
                    yield f"{place}.{name}", "goes with dataset, whose text it chooses; leave it out"
            of_rows = {"keep": source.keep is not None, "text_column": source.text_column != "text"}
            for name in filter(of_rows.get, of_rows):
                if source.path is None and source.dataset is None:
                    yield f"{place}.{name}", "asks for fields, and this text has none; leave it out"
                elif source.format is not None:
                    what = f"asks for fields, and {source.format} have none; leave one of the two out"
                    yield f"{place}.{name}", what
        named = {source.called for _, source in self.text_origins}
        for number, rule in enumerate(self.filters):
            for name in rule.get("sources") or ():
                if name not in named:
                    hint = nearest(name, named) or f"; the sources are: {', '.join(sorted(named))}"
                    what = f"names {name!r}, and there is no such source{hint}"
                    yield f"{at}.filters.{number}.sources", what
        trained = self.tokenizer if isinstance(self.tokenizer, dict) else None
        tokens = [END_OF_TEXT, *((trained or {}).get("special_tokens", ()))]
        for number, token in enumerate(tokens):
            if token in tokens[:number]:
                what = f"is {token!r}, which is there already; leave it out ({END_OF_TEXT} always has id 0)"
                yield f"{at}.tokenizer.special_tokens.{number - 1}", what
        if trained is not None and ("train_vocab_size" in trained) == ("units" in trained):
            what = "needs one of train_vocab_size and units; a tokenizer is trained, or has units"
            yield f"{at}.tokenizer", what
        if trained and "units" in trained:
            merging = ["split", *(["min_frequency"] if trained["units"] == "bytes" else [])]
            for name in filter(trained.get, merging):
                what = f"goes with train_vocab_size, not with units; leave {name} out"
                yield f"{at}.tokenizer.{name}", what
        fewest = 256 + len(tokens)
        if trained and (size := trained.get("train_vocab_size", fewest)) < fewest:
            what = f"is {size}; 256 bytes and {len(tokens)} special tokens need {fewest}"
            yield f"{at}.tokenizer.train_vocab_size", what
        if self.shuffle_blocks and self.shuffle_shards:
            what = "is an order of its own beside data.shuffle_shards; leave one of them out"
            yield f"{at}.shuffle_blocks", what
        if self.validation is None:
            if self.decontaminate and self.decontaminate.validation:
                what = "is true, and there is no data.validation; name its sources, or leave this out"
                yield f"{at}.decontaminate.validation", what
            if not self.validation_share:
                what = "is 0, and there is no data.validation; name its sources, or give a share above 0"
                yield f"{at}.validation_share", what
            return
        # Without a share, a validation source may have the name of the training source that it stands for.
        taken = {"mixture": "the run's mixture"} if is_mixed(self) else {}
        measured = self.sources if self.validation_share else ()
        taken |= {each.called: "a training source, whose own share is measured too" for each in measured}
        for number, source in enumerate(self.validation.sources):
            if source.called in taken:
                what = f"is {source.called!r} like that of {taken[source.called]}; give it another name"
                yield f"{at}.validation.sources.{number}.name", what
            taken[source.called] = f"validation source {number}"


class WishedStage(NamedTuple):
    """Shares as the recipe means them, before any rounding, from sample `start` up to `stop` (None: to the end)."""

    start: int
    stop: int | None
    shares: list[Fraction]
    """[sources], summing to one"""


def is_mixed(data: Data) -> bool:
    """Whether the data section asks for a mixture; without one, all text is one stream in one order."""
    weighted = any(source.weight is not None for source in data.sources)
    return weighted or data.mixture is not None


def run_shares(wished: Sequence[WishedStage], num_samples: int) -> list[Fraction]:
    """The share of each source in a run of `num_samples` blocks, over all its stages: [sources], summing to one."""
    stops = [num_samples if stage.stop is None else stage.stop for stage in wished]
    lengths = [stop - stage.start for stage, stop in zip(wished, stops, strict=True)]
    drawn = [
        [length * share for share in stage.shares] for stage, length in zip(wished, lengths, strict=True)
    ]
    return [sum(column) / num_samples for column in zip(*drawn, strict=True)]


def check_mixture(data: Data, num_samples: int, sequence_length: int) -> Wrong:
    """A mixture is right as far as that shows before its data, and thus its sources' sizes, are there."""
    names = data.source_names
    # without a mixture nothing refers to a source by its name
    for number, name in enumerate(names if is_mixed(data) else ()):
        key = f"data.sources.{number}.name"
        if name in names[:number]:
            yield key, f"is {name!r} like that of source {names.index(name)}; give each a name of its own"
        if name == "mixture":
            yield key, "is 'mixture', which is what validations call the whole mixture; give it another name"
    if data.prepare == "budget" and not shares_are_written(data):
        what = (
            f"is budget, but the {len(names)} sources are read by size, which is known once all is prepared"
        )
        caps = "max_tokens of the sources, if they are large"
        yield "data.prepare", f"{what}; give every source a weight, or set prepare to all (and {caps})"
    if not is_mixed(data):
        return
    weights = [source.weight for source in data.sources]
    for number, weight in enumerate(weights):
        if weight is not None:
            yield from _check_weight(weight, f"data.sources.{number}.weight")
    if any(weights) and None in weights:
        number = weights.index(None)
        what = f"is missing for {names[number]!r}; give every source a weight, or none to mix by size"
        yield f"data.sources.{number}.weight", what
    if any(weights) and (temperature := (data.mixture and data.mixture.temperature) or 1) != 1:
        what = f"is {temperature:g}, but the sources have weights; give a temperature or weights, not both"
        yield "data.mixture.temperature", what
    stages, start = (data.mixture and data.mixture.stages) or [MixtureStage()], 0
    for number, stage in enumerate(stages):
        key, until = f"data.mixture.stages.{number}", stage.until
        if number == len(stages) - 1:
            # 1 and the run's tokens mean the end as well
            if until not in (None, 1, num_samples * sequence_length):
                what = f"is {until:g}, but the last stage goes on to the end of the run; leave it out or add a stage"
                yield f"{key}.until", what
        elif until is None:
            yield f"{key}.until", "is missing: a share of the run below 1, or a number of tokens"
        else:
            stop = block_of(until, num_samples, sequence_length)
            if not start < stop < num_samples:
                what = f"is {until:g}: that is block {stop:,}, which must lie between the stage's start at {start:,}"
                what += f" and the run's end at {num_samples:,} (blocks of {sequence_length:,} tokens)"
                yield f"{key}.until", what
            start = stop
        for name, weight in (stage.weights or {}).items():
            if name not in names:
                hint = nearest(name, names) or f"; the sources are: {', '.join(names)}"
                yield f"{key}.weights.{name}", f"names no source{hint}"
            yield from _check_weight(weight, f"{key}.weights.{name}")
        if stage.weights == {}:
            yield f"{key}.weights", "is empty; give at least one source a weight"
    for name in names:
        if not any(stage.weights is None or name in stage.weights for stage in stages):
            yield "data.mixture.stages", f"no stage reads the source {name!r}; name it in one"


def _check_weight(weight: Any, key: str) -> Wrong:
    # a bool is an int in Python
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 < weight < float("inf"):
        what = f"is {weight!r}; a weight is a number above zero (leave a source out to have it not read)"
        yield key, what


def shares_are_written(data: Data) -> bool:
    """Whether the recipe says what share each source has, without a look at the sources' sizes."""
    stages = (data.mixture and data.mixture.stages) or []
    by_weights = all(source.weight is not None for source in data.sources)
    by_stages = bool(stages) and all(stage.weights is not None for stage in stages)
    return len(data.sources) == 1 or by_weights or by_stages


def num_unique_tokens(data: Data, num_samples: int, sequence_length: int) -> int:
    """Tokens that a run reads at least once: those of its budget, but for what the sources' caps make it repeat."""
    num_tokens, caps = num_samples * sequence_length, [source.max_tokens for source in data.sources]
    if data.packing == "cropped":
        num_tokens *= TEXT_OF_CROPPED
    if not shares_are_written(data):
        # The share of each is not known: only all caps together limit the run.
        return min([num_tokens, *([sum(cap or 0 for cap in caps)] if all(caps) else [])])
    if len(caps) == 1:
        return min(num_tokens, caps[0] or num_tokens)
    stages = read_stages(data, [1] * len(caps), num_samples, sequence_length)
    drawn = [share * num_samples for share in run_shares(stages, num_samples)]
    tokens = [int(samples * num_tokens / num_samples) for samples in drawn]
    return sum(min(read, cap or num_tokens) for read, cap in zip(tokens, caps, strict=True))


def read_stages(
    data: Data, sizes: Sequence[int], num_samples: int, sequence_length: int
) -> list[WishedStage]:
    """The stages of a run of `num_samples` blocks over sources of `sizes` blocks. `check_mixture` comes before."""
    weights = [source.weight for source in data.sources]
    temperature = data.mixture and data.mixture.temperature
    base = shares_of_sizes(sizes, temperature or 1) if None in weights else exact_shares(weights)
    stages = (data.mixture and data.mixture.stages) or [MixtureStage()]
    # stages begin and end at whole blocks
    borders = [block_of(stage.until, num_samples, sequence_length) for stage in stages[:-1]]
    wished = []
    for stage, start, stop in zip(stages, [0, *borders], [*borders, None], strict=True):
        own = stage.weights and exact_shares([stage.weights.get(name, 0) for name in data.source_names])
        wished.append(WishedStage(start, stop, own or base))
    return wished


def block_of(until: float, num_samples: int, sequence_length: int) -> int:
    """Blocks before the border that a stage's `until` names: a share of the run below 1, or a number of tokens."""
    # by its decimal text: 0.1 is one tenth
    exact = Fraction(repr(until))
    return round(exact * num_samples if until < 1 else exact / sequence_length)


def exact_shares(weights: Sequence[float | int]) -> list[Fraction]:
    """Weights as a person wrote them (0.1 is one tenth, not its nearest binary fraction), summing to one."""
    fractions = [Fraction(repr(weight)) for weight in weights]
    total = sum(fractions)
    return [fraction / total for fraction in fractions]


def shares_of_sizes(sizes: Sequence[int], temperature: float = 1) -> list[Fraction]:
    """p_i proportional to n_i ** (1 / T) (Conneau and Lample 2019, section 3.1): T = 1 is by size, large T is even.

    Computed in decimal, so that every machine finds the same shares.
    """
    if temperature == 1:
        return exact_shares(sizes)
    exponent = _DECIMALS.divide(Decimal(1), Decimal(repr(temperature)))
    powers = [Fraction(_DECIMALS.power(Decimal(size), exponent)) for size in sizes]
    total = sum(powers)
    return [power / total for power in powers]


def source_name(spec: dict) -> str:
    """Its own name in the recipe, else the last part of what it is read from."""
    origin = spec.get("builtin") or spec.get("dataset") or spec.get("path")
    return spec.get("name") or PurePosixPath(origin).name
