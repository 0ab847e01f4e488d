"""The one door to private or patched behaviour of torch, Transformers, accelerate and DeepSpeed."""
