# %% [markdown]
# # A run from a notebook
# Open this file as a notebook (VS Code, PyCharm, Jupyter with jupytext), or run it: `python docs/notebook.py`.

# %%
import pandas as pd

from pretraining.api import prepare, run

RECIPE, DATA, RUNS = "tiny", "data", "runs"

# %% [markdown]
# Text becomes tokens once. The second call returns at once.

# %%
data = prepare(RECIPE, data_dir=DATA)
print(data.folder, f"{data.summary['train']['tokens']:,} tokens")

# %% [markdown]
# Tokens are a numpy array; `stop` keeps it small.

# %%
tokens = data.tokens("train", stop=100_000)
counts = pd.Series(tokens).value_counts()
print(tokens.dtype, counts.head())

# %% [markdown]
# Two short runs that differ in one value. An interrupt saves and stops; the same cell goes on.

# %%
results = {}
for rate in (2e-3, 5e-3):
    settings = {"training.learning_rate": rate, "budget.tokens": 81_920, "training.logging_steps": 2}
    results[rate] = run(
        RECIPE, set=settings, data_dir=DATA, output_dir=f"{RUNS}/notebook-{rate:g}", show=False
    )

# %%
rows = [{"rate": rate, "ended": each.exit_reason, **each.metrics} for rate, each in results.items()]
print(pd.DataFrame(rows).set_index("rate")[["ended", "eval/loss", "train/loss"]])

# %% [markdown]
# Every logged step of both runs, side by side.

# %%
curves = {rate: pd.read_json(each.metrics_file, lines=True) for rate, each in results.items()}
by_step = {rate: curve.set_index("step")["train/loss"].dropna() for rate, curve in curves.items()}
print(pd.DataFrame(by_step).tail())
