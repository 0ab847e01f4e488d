"""How good the model is: validation loss, perplexity, bits per byte, samples, HellaSwag, tasks of lm-eval."""
