"""Our words and sentences for datatrove's filter classes, so that both sides judge by the same splitting."""

from datatrove.utils.word_tokenizers import WordTokenizer

from pretraining.data.quality.text import Words, count_sentences


class ReferenceSplitter(WordTokenizer):
    """What datatrove takes as `language`."""

    def word_tokenize(self, text: str) -> list[str]:
        return Words(text).texts

    def sent_tokenize(self, text: str) -> list[str]:
        return [text] * count_sentences(text)

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [(0, len(text))] * count_sentences(text)
