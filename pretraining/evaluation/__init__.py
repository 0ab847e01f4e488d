"""How good the model is: validation loss, perplexity, bits per byte, samples, HellaSwag, tasks of lm-eval.

The names below are imported when first used, so that a question is answered without waiting for torch.
"""

from pretraining.lazy import imported_at_first_use

_HOME = {
    "LiveSamples": "live_samples",
    "Measures": "measures",
    "Validation": "validation",
}

__all__ = list(_HOME)

__getattr__ = imported_at_first_use(__name__, _HOME)
