"""Every causal language model type of transformers, tried small: trained one step, and what it can do here.

    python benchmarks/model_types.py --keep
    python benchmarks/model_types.py --types qwen2 gemma bloom

What fails to train is refused by name in recipes (recipes/schema_generator/model_types.py). A type trains if its logits
do not depend on later tokens, every parameter gets a finite gradient, and its weights can be drawn module by module.
With --keep the abilities (pretraining/model/abilities.py; on two ranks, tests/gear/split_models.py) are kept in
pretraining/recipe/abilities.json, those of types that were not asked for as they were; `make schema` then writes
docs/model_types.md.
"""

import io
import json
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version

from gear import REPOSITORY, parser_of, record

sys.path.insert(0, str(REPOSITORY / "recipes"))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--types", nargs="+", help="instead of all")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.set_verbosity_error()
    from generate_schema import one_line_each

    from pretraining.model.abilities import measured
    from pretraining.recipe.model import MEASURED
    from tests.gear.small_models import measurable, small
    from tests.gear.split_models import measured_on_two

    verdicts, abilities = {}, json.loads(MEASURED.read_text())["types"] if MEASURED.exists() else {}
    for name, entry in types(options.types).items():
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            try:
                verdicts[name] = trial(small(name, entry))
            except Exception as error:
                verdicts[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            if verdicts[name] == "trains":
                section = measurable(name, entry)
                abilities[name] = abilities.get(name, {}) | measured(section) | measured_on_two(section)
        lacks = {key: why for key, why in abilities.get(name, {}).items() if why}
        print(name, verdicts[name], lacks, file=sys.stderr)
    passed = sorted(name for name, words in verdicts.items() if words == "trains")
    failed = {name: words for name, words in verdicts.items() if words != "trains"}
    known = abilities[passed[0]]
    able = {ability: sum(abilities[name][ability] is None for name in passed) for ability in known}
    if options.keep:
        # without the mark of the build: 2.15.0 of 2.15.0+cpu
        versions = {name: version(name).partition("+")[0] for name in ("torch", "transformers", "deepspeed")}
        kept = {"versions": versions, "types": dict(sorted(abilities.items())), "own": classes_of_recipes()}
        MEASURED.write_text(one_line_each(kept) + "\n", encoding="utf-8")
    values = {"tried": len(verdicts), "able": able, "passed": passed, "failed": failed}
    record("model_types", values, options.keep)


def classes_of_recipes() -> dict:
    """{digest of the module: abilities} of the classes that recipes here bring with them.

    That of features/own-model stands for a user's, which is measured at its first use.
    """
    from pretraining.extend import model_extension
    from pretraining.recipe import RECIPES, load_recipe, recipe_names
    from pretraining.recipe.model import measured_by_itself

    found = {}
    for name in (*recipe_names(), *sorted(path.stem for path in (RECIPES / "published").glob("*.json"))):
        model = load_recipe(name).model
        own = model_extension(model["model_type"])
        if own and own.digest not in found:
            found[own.digest] = measured_by_itself(model)
    return found


def types(chosen: list[str] | None) -> dict:
    """Type -> its names and keys, those that recipes refuse among them."""
    from schema_generator import model_types

    from pretraining.recipe.model import EXACT, known_types

    model_types.REFUSED.clear()
    found = {name: known_types()[name] for name in EXACT}
    found |= model_types.other_model_types(exact=list(EXACT))["types"]
    return {name: entry for name, entry in found.items() if not chosen or name in chosen}


def trial(model: dict) -> str:
    """One small model, on the CPU in fp32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pretraining.model.counting import describe
    from pretraining.model.loss import next_token_loss

    facts = describe(model)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{"use_cache": False, "bos_token_id": 0, "eos_token_id": 0, **model})
    network = AutoModelForCausalLM.from_config(config)
    numel = sum(parameter.numel() for parameter in network.parameters())
    if numel != sum(tensor[1] for tensor in facts["tensors"]):
        return "counted otherwise than built"
    if facts["faults"]:
        return f"initial weights: {facts['faults'][0]}"
    ids = torch.randint(1, model["vocab_size"], (2, 16))
    other = ids.clone()
    other[:, 8:] = torch.randint(1, model["vocab_size"], (2, 8))
    with torch.no_grad():
        network.eval()
        first, second = network(input_ids=ids).logits, network(input_ids=other).logits
    if not torch.allclose(first[:, :8], second[:, :8], atol=1e-5):
        return "logits depend on later tokens"
    if torch.allclose(first[:, 8:], second[:, 8:]):
        return "logits do not depend on the tokens"
    network.train()
    next_token_loss(network(input_ids=ids), ids, ids.numel()).backward()
    missing = [key for key, parameter in network.named_parameters() if parameter.grad is None]
    if missing:
        return f"no gradient: {missing[0]}"
    return "trains"


if __name__ == "__main__":
    main()
