"""States as plain values, their hashes, the attributes that a component changes, and its optional methods."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections import OrderedDict, deque
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from grpox.errors import ConfigError
from grpox.plugins.component import bind_object
from grpox.plugins.component_state import (
    NotPlain,
    attribute_hashes,
    changed_attributes,
    plain_state,
    state_hashes,
)


def test_a_plain_state_is_a_copy_with_its_own_tensors() -> None:
    tensor = torch.arange(6.0)
    state = {"a": [1, (2.5, None)], "t": tensor[2:4], "p": torch.nn.Parameter(tensor), 3: {"b": True}}
    copy = plain_state(OrderedDict(state))
    tensor.zero_()
    assert copy["a"] == [1, (2.5, None)]
    assert copy["t"].tolist() == [2.0, 3.0]
    assert copy["t"].untyped_storage().nbytes() == 8  # not the whole of what it was cut from
    assert type(copy["p"]) is torch.Tensor
    assert type(copy) is dict


CIRCLE: dict[str, Any] = {}
CIRCLE["a"] = CIRCLE


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([1], "a list, not a dict"),
        ({"a": [0, {"b": np.float64(1.0)}]}, "['a'][1]['b'] is a numpy.float64"),
        ({"a": np.zeros(2)}, "['a'] is a numpy.ndarray"),
        ({"a": {1, 2}}, "['a'] is a set"),
        ({(1, 2): 3}, "a key of type tuple in its first level"),
        ({"a": torch.eye(2).to_sparse()}, "['a'] is a sparse or quantized tensor"),
        (CIRCLE, "contains itself"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named_with_its_place(state: Any, words: str) -> None:
    with pytest.raises(NotPlain, match=re.escape(words)):
        plain_state(state)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 1.0}),
        ({"a": [1, 2]}, {"a": (1, 2)}),
        ({"a": []}, {"a": {}}),
        ({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([1.0, 2.0 + 1e-6])}),
        ({"a": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}),
        ({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}),
        ({"a": [1 << 20_000]}, {"a": [2 << 20_000]}),
        ({"a": 1}, {"a": "0x1"}),
    ],
)
def test_different_states_have_different_hashes(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert state_hashes(one) != state_hashes(other)
    assert state_hashes(one) == state_hashes(plain_state(one))
    hashes = [state_hashes({"a": {"b": [1, value]}, "c": torch.ones(3)}) for value in (one, other)]
    assert changed_attributes(*hashes) == ["['a']"]


class Average:
    """An object of the component's own module."""

    value = 0.0


class Entry(NamedTuple):
    value: float


class Counts(dict[str, int]):
    """A container of the component's own module."""


class Settings(BaseModel):
    clip: float = 0.2
    other: float = 0.2


class Many:
    """Attributes of every sort."""

    hyperparameters = ("clip",)

    def __init__(self) -> None:
        self.recent, self.average, self.config = deque([1.0]), Average(), Settings()
        self.draws, self.drawn, self.rng = random.Random(0), np.random.default_rng(0), torch.Generator()
        self.numbers = itertools.count()
        self.count, self.rows, self.seen = 0, [{"a": 1}], {"x"}
        self.tensor, self.array = torch.zeros(3), np.zeros(3)
        self.large = torch.zeros(2**20 + 1)
        self.lock, self.model = threading.Lock(), torch.nn.Linear(2, 2)
        self.itself: list[Any] = [self]
        self.entry, self.counts, self.beside_a_module = Entry(1.0), Counts(a=1), [re, 0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda many: setattr(many, "count", 1), "count"),
        (lambda many: many.rows.append({}), "rows"),
        (lambda many: many.rows[0].update(a=2), "rows"),
        (lambda many: many.seen.add("y"), "seen"),
        (lambda many: many.tensor.add_(1), "tensor"),
        (lambda many: many.array.__setitem__(0, 1), "array"),
        (lambda many: many.large.add_(1), "large"),
        (lambda many: setattr(many, "new", 1), "new"),
        (lambda many: many.recent.append(2.0), "recent"),
        (lambda many: setattr(many.average, "value", 1.0), "average"),
        (lambda many: setattr(many.config, "other", 0.3), "config"),
        (lambda many: many.draws.random(), "draws"),
        (lambda many: many.drawn.random(), "drawn"),
        (lambda many: torch.rand(1, generator=many.rng), "rng"),
        (lambda many: next(many.numbers), "numbers"),
        (lambda many: setattr(many, "entry", Entry(2.0)), "entry"),
        (lambda many: many.counts.update(a=2), "counts"),
        (lambda many: many.beside_a_module.__setitem__(1, 1), "beside_a_module"),
    ],
)
def test_a_changed_attribute_is_seen(change: Any, name: str) -> None:
    many = Many()
    before = attribute_hashes(many)
    assert attribute_hashes(many) == before
    change(many)
    assert changed_attributes(before, attribute_hashes(many)) == [name]


def test_objects_count_by_their_type_alone_and_a_hyperparameter_is_an_observers() -> None:
    many = Many()
    before = attribute_hashes(many)
    many.config.clip = 0.4
    many.model.weight.data.zero_()
    many.lock, many.model = threading.Lock(), torch.nn.Linear(2, 2)
    assert attribute_hashes(many) == before
    assert attribute_hashes(len) == {}


def scale(self: Any, rewards: Any, weights: Any, group_ids: Any) -> None: ...


def method(self: Any, value: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"state_dict": method}, "has state_dict and no load_state_dict"),
        ({"load_state_dict": method}, "has load_state_dict and no state_dict"),
        ({"end_step": method, "statistics": {"ratio": "gathr"}}, "did you mean 'gather'?"),
        ({"end_step": method, "statistics": ["ratio"]}, "has the statistics ['ratio']"),
        ({"statistics": {"ratio": "gather"}}, "has statistics and no method end_step"),
        ({"statistics": {"calls": 3}}, ""),  # an attribute of that name is no declaration
        ({"state_dict": method, "stateless": True}, ""),
    ],
)
def test_optional_methods_that_do_not_fit_together_are_refused(members: dict[str, Any], words: str) -> None:
    mine = type("Mine", (), {"scale": scale, **members})
    with nullcontext() if not words else pytest.raises(ConfigError, match=re.escape(words)):
        bind_object("advantage", mine, {}, "advantage", "Mine")
