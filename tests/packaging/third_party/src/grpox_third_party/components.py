"""Components that the specs name; imported only when a run selects them."""

from pathlib import Path

import datasets
import torch

from grpox import hookimpl


class Sums:
    def __init__(self, config):
        self.rows = config.rows

    def load(self):
        pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)][: self.rows]
        columns = {"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]}
        return datasets.Dataset.from_dict(columns)


class Momentum:
    def __init__(self, config):
        self.momentum = config.momentum

    def build(self, parameters, learning_rate):
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=self.momentum)


class Halving:
    def build(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def even(completions, **_):
    return [float(text[-1:] in {"0", "2", "4", "6", "8"}) for text in completions]


class Diary:
    def __init__(self, config):
        self.path = Path(config.file)

    @hookimpl
    def grpox_step_finished(self, step, metrics):
        with self.path.open("a") as file:
            file.write(f"{step} {metrics['learning_rate']}\n")
