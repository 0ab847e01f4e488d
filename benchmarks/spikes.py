"""The spike score on synthetic loss curves: planted spikes found, healthy steps that raise an alarm.

    python benchmarks/spikes.py --curves 200 --steps 1000

Half of the curves hold spikes of 1.3 to 5 times the loss, one to twenty steps long; the others are healthy:
warm-up cliffs, noise of several sizes and shapes, schedules that end in a decay or start again. Prints one JSON line.
"""

import math
import random

from gear import chosen, parser_of, record

SCORE, WINDOW = 6.0, 128


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--curves", type=int, default=200, help="with spikes, and as many without")
    parser.add_argument("--steps", type=int, default=1000, help="of each curve")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    values = {**chosen(options), **measure(options.curves, options.steps, options.seed)}
    record("spikes", values, options.keep)


def measure(num_curves: int, num_steps: int, seed: int) -> dict:
    """Return the share of planted spikes found within three steps, and the false alarms in all healthy steps."""
    draw = random.Random(seed)
    planted = found = alarms = healthy_steps = 0
    for _ in range(num_curves):
        losses, spikes = healthy_curve(draw, num_steps), []
        for start in range(150, num_steps - 50, 250):
            start += draw.randrange(50)
            length, factor = draw.randint(1, 20), draw.uniform(1.3, 5.0)
            for step in range(start, start + length):
                losses[step] *= 1 + (factor - 1) * (1 - (step - start) / length) ** 0.5
            spikes.append((start, length))
        raised = alarm_starts(losses)
        inside = {step for start, length in spikes for step in range(start, start + length + 3)}
        planted += len(spikes)
        found += sum(any(start <= alarm < start + 3 for alarm in raised) for start, _ in spikes)
        alarms += sum(alarm not in inside for alarm in raised)
        healthy_steps += num_steps - len(inside)
        # and as many curves without any
        alarms += len(alarm_starts(healthy_curve(draw, num_steps)))
        healthy_steps += num_steps
    return {
        "planted": planted,
        "found_within_3_steps": round(found / planted, 4),
        "healthy_steps": healthy_steps,
        "false_alarms": alarms,
        "false_alarms_per_100000_steps": round(alarms / healthy_steps * 1e5, 3),
    }


def alarm_starts(losses: list[float]) -> list[int]:
    """The steps at which an episode above the score begins."""
    from pretraining.training.stability import SpikeScore

    course, starts, inside = SpikeScore(WINDOW), [], False
    for step, loss in enumerate(losses):
        is_spike = course.score(loss) > SCORE
        if is_spike and not inside:
            starts.append(step)
        inside = is_spike
        course.add(loss, is_spike)
    return starts


def healthy_curve(draw: random.Random, num_steps: int) -> list[float]:
    """A loss that falls from chance level: cliff, power law, noise, and perhaps a decay or a restart of the rate."""
    start, end, cliff = draw.uniform(6, 11), draw.uniform(2, 4), draw.uniform(5, 80)
    exponent, noise = draw.uniform(0.05, 0.3), draw.choice([0.003, 0.01, 0.02, 0.03])
    heavy, change = draw.random() < 0.3, draw.choice(["none", "none", "decay", "restart"])
    losses = []
    for step in range(num_steps):
        loss = end + (start - end) * math.exp(-step / cliff) + end * (1 + step) ** -exponent
        if change == "decay" and step > 0.8 * num_steps:
            loss *= 1 - 0.15 * (step / num_steps - 0.8) / 0.2
        if change == "restart" and step > num_steps // 2:
            loss *= 1 + 0.1 * min(1.0, (step - num_steps // 2) / 100)
        shape = (draw.expovariate(1) - draw.expovariate(1)) / math.sqrt(2) if heavy else draw.gauss(0, 1)
        losses.append(loss * math.exp(noise * shape))
    return losses


if __name__ == "__main__":
    main()
