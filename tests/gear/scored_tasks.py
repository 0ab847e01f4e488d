"""Items of HellaSwag in its own fields, and folders of lm-eval tasks on local files, for tests."""

import json
import random
from pathlib import Path

WORDS = ("the", "man", "a", "dog", "then", "water", "slowly", "turns", "around", "returns", "over", "def")
WORDS += ("class", "import", "self", "naïve", "[step]", "cuts")

GENERATION = """task: continue_line
validation_split: validation
output_type: generate_until
doc_to_text: "{{ctx_a}}"
doc_to_target: "{{ctx_b}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
PERPLEXITY = """task: read_line
validation_split: validation
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{ctx}}"
metric_list:
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""


def hellaswag_items(number: int = 20) -> list[dict]:
    """Questions of random words, with what the real set has: marks, double spaces, empty parts, long contexts."""
    draw = random.Random(3)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    return [
        {
            "ind": index,
            "activity_label": text(1, 3).capitalize(),
            "ctx_a": f"{text(4, 70)}. [title] {text(2, 5)}  {text(1, 3)}.",
            "ctx_b": "" if index % 3 == 0 else text(1, 4),
            "ctx": f"{text(4, 60)}.",
            "endings": [text(1, 9) + draw.choice([".", " ", " [substeps] " + text(1, 2)]) for _ in range(4)],
            "source_id": f"wikihow~{index}",
            "split": "val",
            "split_type": "indomain",
            "label": str(draw.randrange(4)),
        }
        for index in range(number)
    ]


def write_items(path: Path, number: int = 20) -> Path:
    """A .jsonl file of these items."""
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in hellaswag_items(number)))
    return path


def write_tasks(folder: Path, items: Path) -> Path:
    """A folder of two tasks on those items: one is read, one is continued."""
    _write_task(folder / "read_line.yaml", PERPLEXITY, items)
    _write_task(folder / "continue_line.yaml", GENERATION, items)
    return folder


def write_hellaswag_task(folder: Path, items: Path) -> Path:
    """lm-eval's own HellaSwag, its items from a file."""
    import lm_eval.tasks

    shipped = Path(lm_eval.tasks.__file__).parent / "hellaswag" / "hellaswag.yaml"
    task = f"task: hellaswag\ninclude: {shipped}\ntraining_split: null\n"
    _write_task(folder / "local_hellaswag.yaml", task, items)
    return folder


def _write_task(path: Path, task: str, items: Path) -> None:
    """The YAML of a task whose validation split is a local file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{task}dataset_path: json\ndataset_kwargs: {{data_files: {{validation: {items}}}}}\n")
