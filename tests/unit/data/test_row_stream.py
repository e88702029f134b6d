"""A stream by position: epochs end to end, the same for everyone, forgetting what lies behind."""

from itertools import count

import datasets
import pytest

from grpox.data import row_stream
from grpox.data.row_stream import RowStream
from grpox.errors import ConfigError, RunFailed


def rows(number):
    return datasets.Dataset.from_dict({"n": list(range(number))}).to_iterable_dataset()


def numbers(stream, positions):
    stream.hold(positions)
    return [stream[position]["n"] for position in positions]


def test_epochs_follow_each_other_and_a_window_straddles_their_ends():
    stream = RowStream(rows(5), shuffle=False, seed=0)
    assert stream.rows_per_epoch is None
    assert numbers(stream, range(4)) == [0, 1, 2, 3]
    assert numbers(stream, range(4, 8)) == [4, 0, 1, 2]
    assert stream.rows_per_epoch == 5
    assert stream.place(4) == "row 4 (from 0) of the stream"
    assert stream.place(13) == "row 3 (from 0) of epoch 2 (from 0) of the stream"
    assert numbers(stream, range(8, 20)) == [3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_each_epoch_is_shuffled_anew_by_the_seed_and_any_window_can_be_asked_for_first():
    whole = numbers(RowStream(rows(20), True, seed=3), range(60))
    first, second = whole[:20], whole[20:40]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert list(range(20)) not in (first, second)
    stream = RowStream(rows(20), True, seed=3)
    assert numbers(stream, range(45, 55)) == whole[45:55]
    assert numbers(stream, range(8, 12)) == whole[8:12]  # back: read anew
    assert numbers(stream, range(50, 53)) == whole[50:53]
    assert numbers(RowStream(rows(20), True, seed=4), range(60)) != whole


def test_what_lies_behind_the_window_is_forgotten(monkeypatch):
    monkeypatch.setattr(row_stream, "SHUFFLE_BUFFER", 10)
    stream = RowStream(rows(1000), True, seed=0)
    held = []
    for generation in range(200):
        stream.hold(range(generation * 16, generation * 16 + 16))
        held.append(len(stream._rows))
    assert set(held) == {16}
    with pytest.raises(KeyError):
        stream[0]


def test_rows_are_read_only_as_they_are_needed():
    read = []

    def endless():
        for n in count():
            read.append(n)
            yield {"n": n}

    stream = RowStream(datasets.IterableDataset.from_generator(endless), shuffle=False, seed=0)
    assert numbers(stream, range(100, 104)) == [100, 101, 102, 103]
    assert len(read) <= 106


def test_columns_are_those_of_the_first_row_where_the_dataset_does_not_know_them():
    unknown = datasets.IterableDataset.from_generator(lambda: iter([{"prompt": "a", "answer": "b"}]))
    assert unknown.column_names is None
    assert RowStream(unknown, shuffle=False, seed=0).column_names == ["prompt", "answer"]
    with pytest.raises(ConfigError, match="has no row"):
        RowStream(datasets.IterableDataset.from_generator(lambda: iter([])), shuffle=False, seed=0)


@pytest.mark.parametrize("error", [ValueError("line 3"), SystemExit(0)])
def test_a_row_that_cannot_be_read_is_placed(error):
    def breaks():
        yield from ({"n": 0}, {"n": 1})
        raise error

    stream = RowStream(datasets.IterableDataset.from_generator(breaks), shuffle=False, seed=0)
    told = rf"cannot be read after row 1 \(from 0\) of the stream: {type(error).__name__}: {error}"
    with pytest.raises(RunFailed, match=told):
        stream.hold(range(3))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_that_writes_its_rows_into_one_dict_is_refused(shuffle):
    def rows():
        row = {}
        for number in range(4):
            row["prompt"] = str(number)
            yield row

    stream = RowStream(datasets.IterableDataset.from_generator(rows), shuffle, 0)
    with pytest.raises(RunFailed, match=r"must yield a new dict for each row: row 1 \(from 0\) of the stream"):
        stream.hold(range(2))
