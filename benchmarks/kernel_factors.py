"""Count what the kernels of layers, losses and engines move, and write pretraining/planning/tables/kernels.json.

    python benchmarks/kernel_factors.py
    python benchmarks/kernel_factors.py --families gpt2 llama

Plans take these factors (pretraining/planning/step_time.py). Each is the solution of counts at several widths, and no
table is written if bytes are not linear in them. To be run again after an update of torch, transformers or DeepSpeed;
test_roofline.py tells when.
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace

from gear import REPOSITORY, parser_of

from tests.gear.kernels import COMPILED, OTHER, count_engine, counted, counted_model, join_nobody

TABLE = REPOSITORY / "pretraining" / "planning" / "tables" / "kernels.json"
BATCH, LENGTH = 4, 1024
TOKENS = BATCH * LENGTH
LAYERS = {"gpt2": "n_layer"}
"""What a family calls its number of layers, if not num_hidden_layers."""


def dense(family: str, widths: list[tuple[int, int, int, int]], **more) -> list[dict]:
    """Model sections of these hidden, query, key and inner widths, with heads of 64."""
    return [
        {
            "model_type": family,
            "vocab_size": 1024,
            "hidden_size": hidden,
            "num_attention_heads": queries // 64,
            "num_key_value_heads": keys // 64,
            "head_dim": 64,
            "intermediate_size": inner,
            "max_position_embeddings": LENGTH,
            **more,
        }
        for hidden, queries, keys, inner in widths
    ]


def gpt2(hidden: int, inner: int) -> dict:
    """A model section with its activation in one kernel."""
    widths = {"n_embd": hidden, "n_inner": inner, "n_head": hidden // 64, "n_positions": LENGTH}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    activation = {"activation_function": "gelu_pytorch_tanh"}
    return {"model_type": "gpt2", "vocab_size": 1024, **widths, **dropouts, **activation}


DENSE = [(512, 512, 512, 1024), (1024, 512, 512, 1024), (512, 1024, 512, 1024), (512, 512, 256, 1024)]
DENSE += [(512, 512, 512, 2048), (1024, 1024, 256, 1536)]
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.01}
SHAPES = {
    "gpt2": [gpt2(512, 1024), gpt2(512, 2048), gpt2(1024, 1024), gpt2(768, 3072)],
    "llama": dense("llama", DENSE),
    "qwen3": dense("qwen3", DENSE),
    "mixtral": [
        section
        for chosen, widths in ((2, DENSE), (4, DENSE[:2]), (3, DENSE[:1]))
        for section in dense("mixtral", widths, num_local_experts=8, num_experts_per_tok=chosen, **ROUTED)
    ],
}
SHAPES["qwen3_moe"] = [
    {
        **{key: value for key, value in section.items() if key != "num_local_experts"},
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "moe_intermediate_size": section["intermediate_size"],
    }
    for section in SHAPES["mixtral"]
]
"""Of each family, shapes that differ in one width at a time."""
MIXTURES = ("mixtral", "qwen3_moe")
SPLIT = " split"
"""Behind the name of a family whose experts are split."""
DEGREES = (4, 8)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--families", nargs="+", choices=SHAPES, default=list(SHAPES))
    families = parser.parse_args().families
    values = json.loads(TABLE.read_text(encoding="utf-8"))
    layers = values["layers"]
    for family in families:
        for mode, compiles in COMPILED.items():
            layers.setdefault(family, {})[mode] = layer_factors(family, compiles)
            print(family, mode, layers[family][mode], file=sys.stderr, flush=True)
            if family in MIXTURES:
                with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
                    found = fresh.submit(split_layer_factors, family, compiles).result()
                layers.setdefault(family + SPLIT, {})[mode] = found
                print(family + SPLIT, mode, found, file=sys.stderr, flush=True)
    values |= {"activations": activation_factors(layers["gpt2"]), "loss": loss_factors()}
    values |= {"engines": engine_factors()}
    TABLE.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def layer_factors(family: str, compiles: str, **changes) -> dict:
    """Bytes for a token and each of its widths: those of a model's third layer, for several widths, solved."""
    from pretraining.planning.step_time import layer_widths

    rows, moved = [], {"forward": [], "backward": []}
    for shape in SHAPES[family]:
        section = {**shape, **changes, LAYERS.get(family, "num_hidden_layers"): 3}
        two, three = count_layers(section, compiles)
        widths = layer_widths(section, TOKENS)
        rows.append(list(widths.values()))
        for phase, bytes_moved in moved.items():
            bytes_moved.append((three[phase] - two[phase]) / TOKENS)
    factors = {phase: solved(tuple(widths), rows, bytes_moved) for phase, bytes_moved in moved.items()}
    own = 3 * sum(two.values()) - 2 * sum(three.values())
    factors["outside"] = round(own / TOKENS / widths["hidden"], 2)
    return factors


def split_layer_factors(family: str, compiles: str) -> dict:
    """The same of layers whose experts are split; `again` is what their recomputation moves."""
    from pretraining.ds_config import Degrees
    from pretraining.planning.step_time import layer_widths

    join_nobody(max(DEGREES))
    rows, moved = [], {"forward": [], "backward": [], "again": []}
    for number, shape in enumerate(SHAPES[family]):
        for degree in DEGREES[: 1 + number // 6]:
            two, three = count_layers({**shape, "num_hidden_layers": 3}, compiles, degree)
            widths = layer_widths(shape, TOKENS, Degrees(expert=degree))
            rows.append(list(widths.values()))
            for phase, found in moved.items():
                found.append((three[phase] - two[phase]) / TOKENS)
    return {phase: solved(tuple(widths), rows, bytes_moved) for phase, bytes_moved in moved.items()}


def solved(names: tuple[str, ...], rows: list[list[float]], moved: list[float]) -> dict[str, float]:
    """The factor of each name, for which every row's sum is what was moved."""
    import numpy as np

    found, *_ = np.linalg.lstsq(np.array(rows, float), np.array(moved), rcond=None)
    off = max(abs(np.array(rows) @ found / moved - 1))
    assert off < 0.02, f"bytes are not linear in {names}: {off:.1%} off, {found}"
    return {name: round(float(factor), 2) for name, factor in zip(names, found, strict=False)}


def count_layers(section: dict, compiles: str, ranks: int = 1) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of each phase that two and three layers move, without a loss; `again` if ranks split their experts.

    section: of three layers, which are compiled once; the last is then taken away.
    """
    import torch

    from pretraining.model.build import blocks_of

    with counted_model(section, compiles, ranks) as (model, kernels):
        blocks = list(blocks_of(model))
        if ranks > 1:
            model.activation_checkpointing_enable({"use_reentrant": False})
            for block in blocks:
                block._gradient_checkpointing_func = partial(
                    counted_again, kernels, block._gradient_checkpointing_func
                )
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)

        def run() -> None:
            kernels.phase = "forward"
            hidden = model.base_model(input_ids=ids).last_hidden_state
            kernels.phase = "backward"
            hidden.backward(torch.empty_like(hidden))
            model.zero_grad()

        def moved() -> dict[str, float]:
            counted(run, kernels)
            return {phase: kernels.sum(phase, OTHER).bytes for phase in ("forward", "backward", "again")}

        three = moved()
        layers = next(each for each in model.modules() if blocks[0] in each.children())
        del layers[-1]
        return moved(), three


def counted_again(kernels, checkpoint, function, *arguments):
    """Call transformers' `checkpoint`, and count as phase `again` what the backward pass has computed again."""

    def counted_function(*given):
        phase = kernels.phase
        kernels.phase = "again" if phase == "backward" else phase
        try:
            return function(*given)
        finally:  # torch stops a recomputation by an exception
            kernels.phase = phase

    return checkpoint(counted_function, *arguments)


def activation_factors(gpt2_layers: dict) -> dict:
    """What an activation that is written out in Python moves beyond one kernel, for each inner element."""
    written_out = {
        mode: layer_factors("gpt2", how, activation_function="gelu_new") for mode, how in COMPILED.items()
    }
    return {
        "gelu_new": {
            mode: {
                phase: round(factors[phase]["inner"] - gpt2_layers[mode][phase]["inner"], 2)
                for phase in ("forward", "backward")
            }
            for mode, factors in written_out.items()
        }
    }


def loss_factors() -> dict:
    """Bytes for a logit, an element of the head's input, an entry of the head, and one in every chunk."""
    sizes = [(8192, 512, 1024), (16384, 512, 1024), (8192, 1024, 1024), (8192, 512, 2048), (16384, 1024, 512)]
    factors: dict[str, dict] = {}
    for kind in ("fused", "chunked", "plain"):
        for mode in COMPILED:
            rows, moved = [], []
            for vocab_size, hidden, chunk in sizes:
                head = vocab_size * hidden / TOKENS
                rows.append([vocab_size, *([hidden, head, head * TOKENS / chunk] if kind == "fused" else [])])
                moved.append(count_loss(kind, mode, vocab_size, hidden, chunk) / TOKENS)
            factors.setdefault(kind, {})[mode] = solved(
                ("logit", "hidden", "head", "head a chunk"), rows, moved
            )
    return factors


def count_loss(kind: str, mode: str, vocab_size: int, hidden: int, chunk: int) -> float:
    """Bytes of the loss's kernels beside the head's products, forward and backward."""
    import torch

    from pretraining.model.loss import build_loss
    from pretraining.recipe.sections import Loss

    section = {**gpt2(hidden, hidden), "vocab_size": vocab_size, "n_layer": 1}
    with counted_model(section, "none") as (model, kernels):
        loss = build_loss(model, Loss(kind=kind, chunk_tokens=chunk, compile=mode == "compiled"))
        labels = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        states = torch.empty(BATCH, LENGTH, hidden, dtype=torch.bfloat16, requires_grad=True)

        def run() -> None:
            outputs = SimpleNamespace(logits=model.lm_head(states))
            loss(outputs, labels, num_items_in_batch=torch.ones(())).backward()
            model.zero_grad()
            states.grad = None

        return counted(run, kernels).sum(kind=OTHER).bytes


def engine_factors() -> dict:
    """Bytes a parameter of DeepSpeed's engines: each micro-batch, each step, each step over the ranks' number."""
    from pretraining.ds_config import load_ds_config

    few, many = 2, 8
    factors = {}
    for stage in (0, 1, 2, 3):
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:
            config = load_ds_config(f"zero{stage}")
            found = [fresh.submit(count_engine, config, ranks).result() for ranks in (few, many)]
        share = (found[0]["step"] - found[1]["step"]) / (1 / few - 1 / many)
        factors[str(stage)] = {
            "micro-batch": round(found[1]["micro-batch"], 2),
            "step": round(found[1]["step"] - share / many, 2),
            "step of its share": round(share, 2),
        }
    return factors


if __name__ == "__main__":
    main()
