"""Show the progress of a preparation on stderr: text read, documents, tokens per second."""

import sys
import time
from contextlib import AbstractContextManager

LOG_SECONDS = 10.0
"""Between two lines in a log file, which needs none of a preparation that is over before."""


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A tqdm bar over bytes that also counts documents and tokens; lines if stderr is a file; silent unless `shown`."""

    def __init__(self, description: str = "", shown: bool = False, total_bytes: int | None = None):
        self.shown, self._bar = shown, None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            shown = {"desc": description, "total": total_bytes, "unit": "B", "unit_scale": True}
            self._bar = tqdm(**shown, file=sys.stderr, mininterval=0.2)  # seconds
        self._description, self._total_bytes = description, total_bytes
        self._documents = self._tokens = self._bytes = 0
        self._start = self._last_line = time.perf_counter()

    def add(self, num_documents: int, num_bytes: int, num_tokens: int = 0) -> None:
        """Count a batch."""
        self._documents += num_documents
        self._tokens += num_tokens
        self._bytes += num_bytes
        counts = f"{self._documents:,} documents"
        if self._tokens:
            seconds = time.perf_counter() - self._start
            counts += f", {self._tokens / 1e6:.2f}M tokens, {self._tokens / seconds:,.0f} tokens/s"
        if self._bar is not None:
            # `update` refreshes the bar, at most once in `mininterval`.
            self._bar.set_postfix_str(counts, refresh=False)
            self._bar.update(num_bytes)
        total = f" of {self._total_bytes / 1e6:,.1f}" if self._total_bytes else ""
        self._log(f"{self._bytes / 1e6:,.1f}{total} MB, {counts}")

    def add_shard(self, entry: dict) -> None:
        self.add(entry["documents"], entry["size"], entry["tokens"])

    def label(self, description: str) -> None:
        """Start to count again, under another name."""
        self._documents = self._tokens = self._bytes = 0
        self._description, self._start = description, time.perf_counter()
        self._log("begins")
        if self._bar is not None:
            self._bar.reset()
            self._bar.set_description_str(description, refresh=False)

    def _log(self, text: str) -> None:
        if self.shown and self._bar is None and time.perf_counter() - self._last_line >= LOG_SECONDS:
            self._last_line = time.perf_counter()
            print(f"{self._description}: {text}", file=sys.stderr, flush=True)

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.close()
