"""The quickstart on streamed data: the same prompts on any number of ranks, epoch after epoch."""

import json

import pytest
from support.killing import finish
from support.run_files import SHORT, completions_of, metrics_of

STEPS = 5
# 12 prompts, 5 a generation batch: the third one straddles the end of the first epoch.
FEW = (
    *(f"train.max_steps={STEPS}", "train.num_generations=2", "train.generation_batch_size=10"),
    *("data.streaming=true", "data.path=twelve.jsonl", *SHORT),
)


@pytest.fixture(scope="module", autouse=True)
def twelve(folder):
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(12, 24)]
    (folder / "twelve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder, name, *overrides, ranks=1):
    """Return the prompts of each generation batch, and the metric `epoch`."""
    size = f"train.per_device_train_batch_size={10 // ranks}"
    finish(folder, "quickstart", *FEW, size, f"output_dir={name}", *overrides, ranks=ranks)
    records = [completions_of(folder / name, step) for step in range(1, STEPS + 1)]
    groups = [dict.fromkeys((row["group"], row["prompt"]) for row in record) for record in records]
    return [[prompt for _, prompt in each] for each in groups], [m["epoch"] for m in metrics_of(folder / name)]


def test_every_number_of_ranks_draws_the_same_prompts(folder):
    batches, epochs = train(folder, "one")
    assert train(folder, "two", ranks=2) == (batches, epochs)
    assert [len(batch) for batch in batches] == [5] * STEPS
    drawn = [prompt for batch in batches for prompt in batch]
    first, second = drawn[:12], drawn[12:24]
    assert sorted(first) == sorted(second) == [f"{n}+{n}=" for n in range(12, 24)]
    assert first != second
    # Two epochs end within the 25 prompts; the first is known to end only with the third batch.
    assert epochs == pytest.approx([0, 0, 15 / 12, 20 / 12, 25 / 12])


def test_without_shuffling_the_order_is_that_of_the_file(folder):
    batches, _ = train(folder, "ordered", "train.shuffle_dataset=false")
    drawn = [prompt for batch in batches for prompt in batch]
    assert drawn == [f"{n}+{n}=" for n in [*range(12, 24), *range(12, 24), 12]]
