"""What an alert says: likely causes and what to try, in the order in which they are worth a look."""

ADVICE = {
    "spike": {
        "causes": [
            "the data of these samples (see documents and flagged)",
            "the learning rate is high for this point of the schedule",
            "the second moments lag behind larger gradients",
        ],
        "try": [
            "look at the samples: python -m pretraining.data inspect DATA --sample N --recipe RECIPE",
            "monitors.spikes.policy rollback: goes back and leaves these samples out",
            "a lower training.learning_rate, a longer warmup_steps, a lower adam_beta2 (0.95)",
            "a lower training.max_grad_norm",
        ],
    },
    "non_finite": {
        "causes": [
            "a number beyond the precision's range: attention scores or logits that grow",
            "the data of these samples (see documents and flagged)",
            "the learning rate",
        ],
        "try": [
            "training.bf16 in place of training.fp16, or fp32 for some steps to find the place",
            "a lower training.learning_rate or training.max_grad_norm",
        ],
    },
    "gradient_explosion": {
        "causes": [
            "the learning rate is close to what this model bears",
            "unusual samples: repeated tokens, one language among others",
        ],
        "try": [
            "nothing yet where the loss holds: training.max_grad_norm bounds the step",
            "a lower training.learning_rate",
        ],
    },
    "starved_experts": {
        "causes": [
            "the balancing loss weighs too little beside the cross-entropy",
            "the routers settled while the learning rate was high",
        ],
        "try": [
            "a higher model.router_aux_loss_coef (0.01 is common)",
            "loss.router_z_loss (0.001), a longer training.warmup_steps",
        ],
    },
    "plateau": {
        "causes": [
            "the learning rate has decayed, or is too high to settle",
            "the model has learned what its size and this data allow",
        ],
        "try": [
            "compare with the validation loss: a gap says memorised data, none says capacity",
            "another schedule or learning rate in a run of its own, from an earlier checkpoint",
        ],
    },
}


def advice(kind: str) -> dict[str, list[str]]:
    """{"causes", "try"} of one kind of alert."""
    return ADVICE[kind]
