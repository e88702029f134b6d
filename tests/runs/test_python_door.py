"""`grpox.train` and `grpox.Run` with objects: examples of docs/python.md, single steps, the model after it."""

import re
from pathlib import Path

import pytest
from support.killing import recorded
from support.processes import run
from support.run_files import metrics_of

DOCS = Path(__file__).parents[2] / "docs" / "python.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def python(grpox, folder):
    """``python(script, ranks=1)`` beside a copy of the quickstart; the lines that it printed."""
    assert grpox("recipes", "copy", "quickstart").returncode == 0

    def run_script(script, ranks=1):
        (folder / "script.py").write_text(script)
        done = run("script.py", cwd=folder, ranks=ranks)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.strip().splitlines()

    return run_script


def test_the_first_example_goes_step_by_step(python, folder):
    printed = python(EXAMPLES[0] + "print(summary['steps'], len(run.evaluations), logits.shape[-1])")
    assert printed[-1] == "4 3 17"
    metrics = metrics_of(folder / "runs" / "default")[0]
    assert metrics["rewards/right/mean"] == metrics["reward"]


def test_functions_keep_the_weights_of_their_mappings(python, folder):
    python(EXAMPLES[2])
    [metrics] = metrics_of(folder / "runs" / "weighted")
    parts = {"exact": 1, "short": 0.2, "length": 0.1}
    total = sum(weight * metrics[f"rewards/{name}/mean"] for name, weight in parts.items())
    assert metrics["reward"] == pytest.approx(total)


TWICE = """
import torch
from transformers import AutoModelForCausalLM
from grpox import train


def varied(completions, **columns):
    return [float(sum(map(ord, text)) % 7) for text in completions]


rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8, 50)]
model = AutoModelForCausalLM.from_pretrained("quickstart/model")
tied = model.lm_head.weight is model.model.embed_tokens.weight
before = [parameter.detach().clone() for parameter in model.parameters()]
config = {
    "train": {"max_steps": 2, "per_device_train_batch_size": 32, "learning_rate": 1e-3, "beta": 0.1},
    "sampling": {"max_completion_length": 4, "temperature": 1.5},
    "tracking": {},
    "output_dir": "runs/first",
}
one = train(config, model=model, dataset=rows, eval_dataset=rows[:4], rewards=varied)
assert tied == (model.lm_head.weight is model.model.embed_tokens.weight)
after = [parameter.detach().clone() for parameter in model.parameters()]
moved = max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True))
assert moved > 1e-4, moved
saved = AutoModelForCausalLM.from_pretrained(one["model"])
assert all(torch.equal(a, b) for a, b in zip(after, saved.parameters(), strict=True))
ids = torch.tensor([[3, 4, 5]])
assert torch.equal(model(ids).logits, saved(ids).logits)
assert model.generate(ids, max_new_tokens=2).shape[1] > 3

two = train(config | {"output_dir": "runs/second"}, model=model, dataset=rows, rewards=[varied])
again = [parameter.detach().clone() for parameter in model.parameters()]
assert max(float((a - b).abs().max()) for a, b in zip(again, after, strict=True)) > 1e-4

# What went on from the object is what goes on from the folder that holds the same weights.
three = train(config | {"output_dir": "runs/third"}, model=one["model"], dataset=rows, rewards=[varied])
saved = AutoModelForCausalLM.from_pretrained(three["model"])
assert all(torch.equal(a, b) for a, b in zip(again, saved.parameters(), strict=True))
print("fine", "rewards/varied/mean_before" in one, "rewards/varied/mean_before" in two)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_object_holds_the_trained_weights_and_trains_again(python, ranks):
    assert python(TWICE, ranks)[-1] == "fine True False"


SMALL_GPU = """
import grpox.training.run
from grpox import train
from grpox.errors import ConfigError


def free_memory(world):
    return min(world.gather([10**9 if world.is_main else 10**6]))


def loaded(run):
    raise AssertionError("the model was loaded")


grpox.training.assembly.free_memory, grpox.training.run.open_model = free_memory, loaded
try:
    train("quickstart.yaml", ["tracking={}", "output_dir=runs/small-gpu"])
except ConfigError as error:
    print(error.problems[0].key, "every GPU needs" in str(error))
"""


def test_a_model_that_the_gpu_of_one_rank_cannot_hold_is_refused_by_all_before_it_loads(python, folder):
    assert python(SMALL_GPU, ranks=2)[-1] == "model.path True"
    assert not (folder / "runs" / "small-gpu").exists()


TYPES = """
import json, pickle, threading
import psutil, torch
from transformers import AutoModelForCausalLM
import grpox
from grpox.errors import ConfigError, RunFailed


def varied(completions, **columns):
    return [float(sum(map(ord, text)) % 7) for text in completions]


class Followed:
    def __init__(self):
        self.seen = []

    def grpox_step_finished(self, step):
        self.seen.append(step)

    def grpox_run_failed(self, error):
        self.seen.append(str(error))

    def grpox_run_finished(self):
        self.seen.append("end")

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8, 50)]


def config(name):
    return {
        "train": {"max_steps": 4, "per_device_train_batch_size": 32, "learning_rate": 1e-3, "beta": 0.1},
        "sampling": {"max_completion_length": 4, "temperature": 1.5},
        "evaluation": {"every": 2, "accuracy": "varied"},
        "logging": {"completions_every": 0},
        "tracking": {},
        "output_dir": f"runs/{name}",
    }


def load():
    return AutoModelForCausalLM.from_pretrained("quickstart/model")


def opened(name, model=None, **others):
    model = model or load()
    return grpox.Run(config(name), model=model, dataset=rows, eval_dataset=rows[:4], rewards=varied, **others)


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
"""

STEPPED = (
    TYPES
    + """
whole, stepped, followed = load(), load(), Followed()
summary = grpox.train(config("whole"), model=whole, dataset=rows, eval_dataset=rows[:4], rewards=varied)
run = opened("stepped", stepped, callbacks=[followed])
first = run.step()
torch.rand(3)  # the caller's random numbers are no part of the run
assert (first["step"], run.history, run.evaluations[0]["step"]) == (1, [first], 0)
policy, ids = run.policy, torch.tensor([[3, 4, 5]])
assert policy.generate(ids, max_new_tokens=2).shape[1] > 3
before = policy(ids).logits
run.step()
torch.rand(5)
assert run.policy is policy and not torch.equal(policy(ids).logits, before)
try:
    opened("another")
except ConfigError as error:
    assert "runs/stepped" in str(error), error
else:
    raise AssertionError("two runs are open")
assert run.evaluate() is run.evaluations[-1]
assert [each["step"] for each in run.evaluations] == [0, 2]
run.step()
assert run.evaluate()["step"] == 3
result = run.train()
assert result.keys() == summary.keys() and result["accuracy_after"] == summary["accuracy_after"]
assert [row["step"] for row in run.history] == [1, 2, 3, 4] and run.done
assert run.policy is stepped and same(whole, stepped)
rank = torch.distributed.get_rank()
assert followed.seen == ([1, 2, 3, 4, "end"] if rank == 0 else []), followed.seen
if rank == 0:
    print("fine")
"""
)

CLOSED = (
    TYPES
    + """
whole = load()
grpox.train(config("whole-2"), model=whole, dataset=rows, eval_dataset=rows[:4], rewards=varied)
threads = threading.active_count()
left, followed = load(), Followed()
with opened("closed", left, callbacks=[followed]) as run:
    assert {parameter.shape for parameter in left.parameters()} == {(0,)}  # shards: no error tells
    run.step()
    path = run.save()
    assert path.is_dir() and path.name == "step-00000001", path
    run.step()
    last = run.policy
assert threading.active_count() == threads and not psutil.Process().children()
assert same(last, left) and same(run.policy, left)
kept, trained = last.state_dict(), left.state_dict()
assert kept.keys() == trained.keys() and all(torch.equal(kept[name], trained[name]) for name in kept)
# An ordinary model: nothing of the engine is left in it.
ids, copied = torch.tensor([[3, 4]]), pickle.loads(pickle.dumps(left))
assert torch.equal(copied(ids).logits, left(ids).logits)
for each, fresh in zip(left.modules(), load().modules(), strict=True):
    assert vars(each).keys() == vars(fresh).keys() and not each._forward_hooks and not each._forward_pre_hooks
assert followed.seen == [1, 2, "closed after step 2 of 4"], followed.seen
try:
    run.step()
except RunFailed as error:
    assert "closed after step 2 of 4" in str(error), error
else:
    raise AssertionError("a closed run takes a step")

resumed, again = load(), Followed()
assert opened("closed", resumed, callbacks=[again], resume=True).train()["steps"] == 4
assert same(whole, resumed) and again.seen == [1, 2, 3, 4, "end"]
complete = opened("closed", callbacks=[again], resume=True)
assert same(complete.policy, resumed)  # not the object that was given, which nothing has trained
assert "step 4 of 4" in complete._repr_html_()
assert complete.done and complete.train()["steps"] == 4


class Stops:
    def grpox_evaluated(self, step, control):
        if step == 1:
            control.stop("good enough")


run = opened("stopped", callbacks=[Stops()])
run.step()
run.evaluate()
assert run.done
summary = run.train()
assert (summary["steps"], summary["stopped_early"]["reason"]) == (1, "good enough"), summary

try:
    with opened("broken") as run:
        run.step()
        raise ValueError("mine")
except ValueError:
    assert "ValueError: mine" in open("runs/broken/failure.json").read()


def failing(completions, **columns):
    raise OSError("no judge")


run = grpox.Run(config("failed") | {"evaluation": None}, model=load(), dataset=rows, rewards=failing)
for _ in range(2):
    try:
        run.step()
    except RunFailed as error:
        assert "no judge" in str(error), error
    else:
        raise AssertionError("a failed run takes a step")
run.close()

del run, complete
lost = opened("lost")
lost.step()
del lost
opened("after").close()
print("fine")
"""
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_then_train_are_one_whole_run(python, folder, ranks):
    assert "fine" in python(STEPPED, ranks)
    whole, stepped = (recorded(folder / "runs" / name) for name in ("whole", "stepped"))
    assert [line for line in whole if "metrics" in line] == [line for line in stepped if "metrics" in line]
    assert sum("metrics" in line for line in whole) == 4


def test_a_closed_run_goes_on_and_leaves_nothing(python):
    assert "fine" in python(CLOSED)
