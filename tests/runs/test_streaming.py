"""The quickstart on streamed data: the same prompts on any number of ranks, epoch after epoch."""

import json

import pyarrow.parquet
import pytest
from support.run_files import SHORT, metrics_of

STEPS = 5
# 12 prompts, 5 a generation batch: the third one straddles the end of the first epoch.
FEW = (
    *(f"train.max_steps={STEPS}", "train.num_generations=2", "train.generation_batch_size=10"),
    *("data.streaming=true", "data.path=twelve.jsonl", *SHORT),
)


@pytest.fixture(scope="module")
def train(grpox, folder):
    """``train(name, *overrides, ranks=1)``: the prompts of each generation batch, and the metric `epoch`."""
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(12, 24)]
    (folder / "twelve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name, *overrides, ranks=1):
        per_device = f"train.per_device_train_batch_size={10 // ranks}"
        done = grpox("train", "quickstart", *FEW, per_device, f"output_dir={name}", *overrides, ranks=ranks)
        assert done.returncode == 0, done.stderr[-4000:]
        prompts = []
        for file in sorted((folder / name / "completions").glob("*.parquet")):
            table = pyarrow.parquet.read_table(file).to_pydict()
            prompts.append(list(dict.fromkeys(zip(table["group"], table["prompt"], strict=True))))
        epochs = [step["epoch"] for step in metrics_of(folder / name)]
        return [[prompt for _, prompt in batch] for batch in prompts], epochs

    return run


def test_every_number_of_ranks_draws_the_same_prompts(train):
    batches, epochs = train("one")
    assert train("two", ranks=2) == (batches, epochs)
    assert [len(batch) for batch in batches] == [5] * STEPS
    drawn = [prompt for batch in batches for prompt in batch]
    first, second = drawn[:12], drawn[12:24]
    assert sorted(first) == sorted(second) == [f"{n}+{n}=" for n in range(12, 24)]
    assert first != second
    # Two epochs end within the 25 prompts; the first is known to end only with the third batch.
    assert epochs == pytest.approx([0, 0, 15 / 12, 20 / 12, 25 / 12])


def test_without_shuffling_the_order_is_that_of_the_file(train):
    batches, _ = train("ordered", "train.shuffle_dataset=false")
    drawn = [prompt for batch in batches for prompt in batch]
    assert drawn == [f"{n}+{n}=" for n in [*range(12, 24), *range(12, 24), 12]]
