"""Memory of a run: model states, activations, the loss, ZeRO's buffers; per GPU, host and NVMe."""
