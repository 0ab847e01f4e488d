"""`inspect`: show documents as text, and the documents in a block or in a sample of a run."""

import random
from pathlib import Path

from pretraining.data.documents import Stretch
from pretraining.data.manifest import data_differences
from pretraining.data.tools.finished import FinishedData, SplitDocuments, open_finished
from pretraining.errors import UserError
from pretraining.outside.masking import escaped
from pretraining.recipe.recipe import Recipe
from pretraining.schema import listed

SEARCH_BATCH = 256
"""Documents that a search decodes at once."""

SHOWN_STRETCHES = 4
"""Places of a packed block that its heading names; all its documents are shown."""


class Inspection:
    """One split of a data set with the tokenizer that turns its tokens back into text."""

    def __init__(self, folder: Path, split: str = "train"):
        self.data: FinishedData = open_finished(folder)
        self.split: SplitDocuments = self.data.split(split)
        self.decoder = self.data.decoder()
        self.eos: int = self.data.manifest["tokenizer"]["eos_token_id"]

    def document(self, number: int) -> dict:
        """Return place and text of one document; UserError if there is no such number."""
        _check_range("document", number, self.split.num_documents, self.split.name)
        document = self.split.read(number)
        return {**document.place(), "text": self._text(document.tokens)}

    def documents_from(self, number: int, count: int) -> list[dict]:
        """Return `count` documents from `number` on, or fewer at the end of the split."""
        _check_range("document", number, self.split.num_documents, self.split.name)
        return [self.document(n) for n in range(number, min(number + count, self.split.num_documents))]

    def random_documents(self, count: int, seed: int) -> list[dict]:
        """Draw up to `count` documents with `seed`; return them in the order of the split."""
        # A range, so that no list of all documents is made.
        population = range(self.split.num_documents)
        chosen = random.Random(seed).sample(population, min(count, len(population)))
        return [self.document(number) for number in sorted(chosen)]

    def search(self, wanted: str, count: int) -> list[dict]:
        """Find the first `count` documents with `wanted` in their text; decodes from the start of the split."""
        found: list[dict] = []
        for first in range(0, self.split.num_documents, SEARCH_BATCH):
            last = min(first + SEARCH_BATCH, self.split.num_documents)
            documents = [self.split.read(number) for number in range(first, last)]
            # tokenizers decodes the documents of a batch in parallel.
            texts = self.decoder.decode_batch(
                [self._ids(d.tokens) for d in documents], skip_special_tokens=False
            )
            found += [
                {**document.place(), "text": text}
                for document, text in zip(documents, texts, strict=True)
                if wanted in text
            ]
            if len(found) >= count:
                break
        return found[:count]

    def block(self, number: int, sequence_length: int) -> dict:
        """Describe block `number` (`sequence_length` inputs and one more target) and each document's part in it."""
        num_blocks = self.split.stream.num_blocks(sequence_length)
        _check_range("block", number, num_blocks, self.split.name)
        start = number * sequence_length
        whole = self._made_of([(start, start + sequence_length)])
        return {"block": number, "num_blocks": num_blocks, **whole}

    def _made_of(self, stretches: list[Stretch]) -> dict:
        """Describe a block of these stretches of the stream and the token after them, and each document's part."""
        parts, length = [], 0
        for number, (start, stop) in enumerate(stretches, 1):
            # Only the last stretch has the token after it, the target of the last input.
            end = stop + 1 if number == len(stretches) else stop
            for document in self.split.between(start, end):
                first, last = max(start, document.start), min(end, document.stop)
                inside = (first - document.start, last - document.start)
                place = {
                    "document_tokens": list(inside),
                    "block_tokens": [first - start + length, last - start + length],
                }
                parts.append(
                    {**document.place(), **place, "text": self._text(document.tokens[slice(*inside)])}
                )
            length += stop - start
        return {
            "split": self.split.name,
            "sequence_length": length,
            "stretches": [list(stretch) for stretch in stretches],
            "documents": parts,
        }

    def sample(self, number: int, recipe: Recipe) -> dict:
        """Describe the block that a run of `recipe` reads as sample `number`, with its step and epoch."""
        from pretraining.data.packed_dataset import build_training_dataset
        from pretraining.data.prepared import PreparedData

        manifest = self.data.manifest
        # No recipe section made converted data, so there is nothing to compare.
        differing = [] if "converted_from" in manifest else data_differences(manifest, recipe.data.to_dict())
        if differing:
            raise UserError(
                f"{self.data.folder}: not the data that recipe {recipe.name!r} trains on: {listed(differing)}; give "
                "the folder of its data.name"
            )
        if self.split.name != "train":
            raise UserError(
                "--sample: a run reads its samples from train; --block shows blocks of other splits"
            )
        if not 0 <= number < recipe.most_samples:
            raise UserError(f"--sample {number:,}: the run has {recipe.most_samples:,}, counted from 0")
        length = recipe.sequence_length
        # A split that is shorter than one block has no samples.
        _check_range("block", 0, self.split.stream.num_blocks(length), self.split.name)
        # Converted data may have no validation.
        held_out = "validation" if "validation" in self.data.split_names else "train"
        validation = self.data.split(held_out).stream
        prepared = PreparedData(self.data.folder, manifest, self.split.stream, validation)
        dataset = build_training_dataset(prepared.for_run(recipe), recipe, number, 1)
        source, stretches = dataset.place(int(dataset.block_numbers([0])[0]))
        # The stretches count from the start of their source, `between` from the start of the split.
        before = sum(split.num_tokens for split in dataset.splits[:source])
        where = {
            "sample": number,
            # Steps count from 1, samples and epochs from 0.
            "step": recipe.step_sizes.steps_within(number * length) + 1,
            "epoch": number // dataset.num_blocks,
            "recipe": recipe.name,
        }
        return {**where, **self._made_of([(before + start, before + stop) for start, stop in stretches])}

    def _text(self, tokens) -> str:
        return self.decoder.decode(self._ids(tokens), skip_special_tokens=False)

    def _ids(self, tokens) -> list[int]:
        """Return the ids without the EOS at the end of the document."""
        ids = tokens.tolist()
        return ids[:-1] if ids and ids[-1] == self.eos else ids


def _check_range(what: str, number: int, count: int, split: str) -> None:
    if count == 0:
        raise UserError(f"{split} has no {what}; use a shorter sequence length or another --split")
    if not 0 <= number < count:
        raise UserError(f"--{what} {number}: {split} has {count:,}, counted from 0 to {count - 1:,}")


def documents_text(documents: list[dict], max_chars: int) -> str:
    """Format documents for a reader, each cut to `max_chars` characters (0: whole)."""
    return "\n\n".join(f"{_head(d)}\n{_cut(d['text'], max_chars)}" for d in documents)


def _head(document: dict) -> str:
    return (
        f"[{document['split']} document {document['number']:,}: {document['tokens']:,} tokens, "
        f"{document['num_bytes']:,} bytes, source {document['source']}, {document['shard']} row "
        f"{document['row']:,}]"
    )


def _cut(text: str, max_chars: int) -> str:
    if max_chars and len(text) > max_chars:
        return f"{escaped(text[:max_chars])} [{len(text) - max_chars:,} more characters]"
    return escaped(text)


def block_text(block: dict, max_chars: int) -> str:
    """Format a block for a reader: its place, then each document's part."""
    lines = []
    if "sample" in block:
        lines.append(
            f"sample {block['sample']:,} of recipe {block['recipe']}: step {block['step']:,}, "
            f"epoch {block['epoch']:,}"
        )
    name = (
        f"block {block['block']:,} of {block['num_blocks']:,} in sequence" if "block" in block else "a block"
    )
    stretches = [f"{start:,} to {stop - 1:,}" for start, stop in block["stretches"]]
    places = ", ".join(stretches[:SHOWN_STRETCHES])
    if len(stretches) > SHOWN_STRETCHES:
        places += f" and {len(stretches) - SHOWN_STRETCHES} more stretches"
    lines.append(
        f"{block['split']}, {name}: tokens {places} of the stream "
        f"({block['sequence_length']:,} inputs and one more target), parts of {len(block['documents']):,} documents"
    )
    for part in block["documents"]:
        (first, last), (begin, end) = part["document_tokens"], part["block_tokens"]
        lines += [
            "",
            _head(part),
            f"[its tokens {first:,} to {last - 1:,} are the block's {begin:,} to {end - 1:,}]",
        ]
        lines.append(_cut(part["text"], max_chars))
    return "\n".join(lines)
