"""Show the progress of a preparation on stderr: text read, documents, tokens per second."""

import sys
import time
from typing import Self


class Silence:
    """Stand in for `Progress` in a task whose output nobody watches."""

    shown = False

    def add(self, num_documents: int, num_bytes: int, num_tokens: int = 0) -> None:
        """Show nothing."""

    def label(self, description: str) -> None:
        """Show nothing."""


class Progress:
    """A tqdm bar over bytes that also counts documents and tokens; silent unless `shown`."""

    def __init__(self, description: str, shown: bool, total_bytes: int | None = None):
        from tqdm import tqdm

        self.shown = shown
        to_terminal = sys.stderr.isatty()  # else a log file
        self._bar = tqdm(
            desc=description,
            total=total_bytes,
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            disable=not shown,
            mininterval=0.2 if to_terminal else 10.0,  # seconds; a log file needs no line five times a second
        )
        self._documents = self._tokens = 0
        self._start = time.perf_counter()

    def add(self, num_documents: int, num_bytes: int, num_tokens: int = 0) -> None:
        """Count a batch."""
        self._documents += num_documents
        self._tokens += num_tokens
        counts = f"{self._documents:,} documents"
        if self._tokens:
            seconds = time.perf_counter() - self._start
            counts += f", {self._tokens / 1e6:.2f}M tokens, {self._tokens / seconds:,.0f} tokens/s"
        # `update` refreshes the bar, at most once in `mininterval`.
        self._bar.set_postfix_str(counts, refresh=False)
        self._bar.update(num_bytes)

    def label(self, description: str) -> None:
        """Start to count again, under another name."""
        self._documents = self._tokens = 0
        self._start = time.perf_counter()
        self._bar.reset()
        self._bar.set_description_str(description, refresh=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()
