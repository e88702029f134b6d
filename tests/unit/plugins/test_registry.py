"""Selecting: strict about what is named, lenient about the rest, every mistake with key and remedy."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from support.problems import problem_of, refused

import grpox
from grpox.config import ComponentRef, RewardRef, RunConfig
from grpox.contracts import LossInputs, Reduction
from grpox.errors import ConfigError, Problem, RunFailed
from grpox.plugins.component import BoundComponent, bind_object
from grpox.plugins.discovery import discover
from grpox.plugins.load_object import load_object
from grpox.plugins.registry import Registry
from grpox.runfile.checks import CheckContext, missing_plugins
from grpox.runfile.objects import RunObjects

FOO = """
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field
from grpox import ComponentSpec, hookimpl
from grpox.contracts import Reduction

class Schedule(BaseModel):
    model_config = ConfigDict(extra="ignore")
    warm: int = 0

class Config(BaseModel):
    model_config = ConfigDict(extra="allow")
    clip_low: float = Field(0.2, gt=0, le=1)
    level: Literal["token", "sequence"] = "token"
    schedule: Schedule = Schedule()

class Bare:
    reduction = Reduction.TOKEN_MEAN
    def per_token(self, inputs): ...

class Foo(Bare):
    def __init__(self, config):
        self.config = config

class NoReduction:
    reduction = "token_mean"
    def per_token(self, inputs): ...

class Raises(Bare):
    def __init__(self):
        raise ValueError("no luck")

class Quits(Bare):
    def __init__(self):
        raise GeneratorExit

def scores(completions, **columns):
    return [1.0 for _ in completions]

NOT_A_CLASS = 3

@hookimpl
def grpox_losses():
    return [
        ComponentSpec("foo", "grpox_foo:Foo", config="grpox_foo:Config", needs=("entropy",)),
        ComponentSpec("bare", "grpox_foo:Bare"),
        ComponentSpec("raises", "grpox_foo:Raises"),
        ComponentSpec("quits", "grpox_foo:Quits"),
        ComponentSpec("function", "grpox_foo:scores"),
        ComponentSpec("empty", "grpox_foo:Config"),
        ComponentSpec("no-reduction", "grpox_foo:NoReduction"),
        ComponentSpec("absent", "grpox_foo:Absent"),
        ComponentSpec("bad-config", "grpox_foo:Foo", config="no_such_module:Config"),
        ComponentSpec("no-model", "grpox_foo:Foo", config="grpox_foo:Bare"),
        ComponentSpec("newer", "grpox_foo:Foo", api=99),
        ComponentSpec("lacking", "grpox_foo:Foo", requires=("nothing-such>=1",)),
    ]

@hookimpl
def grpox_rewards():
    return [
        ComponentSpec("short", "grpox_foo:scores"),
        ComponentSpec("number", "grpox_foo:NOT_A_CLASS"),
        ComponentSpec("foo", "grpox_foo:Foo", config="grpox_foo:Config"),
    ]

@hookimpl
def grpox_generators():
    provides = ("logprobs", "entropy")
    return [ComponentSpec("oracle", "grpox_foo:Bare", provides=provides, requires=("nothing-such",))]
"""

BAD = "import no_such_module_anywhere"
MINE = """
from pydantic import BaseModel
from grpox.contracts import Reduction
class Mine:
    reduction = Reduction.TOKEN_MEAN
    def per_token(self, inputs): ...
    needs = ('entropy',)
    class Config(BaseModel):
        cap: float = 1.0
    def __init__(self, config):
        self.cap = config.cap
"""


@pytest.fixture
def registry(make_distribution):
    make_distribution("grpox-foo", FOO)
    return Registry(discover(disable=["grpox"]))


def parse_problems(registry, kind="loss", key="loss", **ref) -> dict[str, Problem]:
    reference = (RewardRef if kind == "reward" else ComponentRef)(**ref)
    told = refused(registry.parse, kind, reference, key)
    return {problem.key: problem for problem in told if "might offer it" not in problem.what}


def test_a_name_is_looked_for_in_its_kind_and_an_unknown_one_told_with_the_nearest(registry):
    assert registry.find("loss", "foo").spec.needs == ("entropy",)
    assert registry.find("reward", "foo").spec.needs == ()
    (problem,) = (each for each in refused(registry.find, "loss", "fooo") if each.given)
    assert (problem.what, problem.nearest) == ("no loss called 'fooo' is installed", "foo")
    assert problem.allowed.split(", ") == sorted(problem.allowed.split(", "))
    assert {"foo", "bare", "newer"} <= set(problem.allowed.split(", "))
    assert "short" not in problem.allowed


@pytest.mark.parametrize(
    ("kind", "name", "near"),
    [
        ("loss", "gropo", "grpo"),
        ("loss", "Dr.GRPO", "dr_grpo"),
        ("loss", "gspo", "{name: grpo, level: sequence}"),
        ("loss", "a/b c.py:Loss", "{path: a/b c.py:Loss}"),
        ("advantage", "rlo", "rloo"),
        ("advantage", "reinforce++", "reinforce_plus_plus"),
        ("advantage", "reinforce", ""),
        ("advantage", "grpo", "group"),
    ],
)
def test_no_other_algorithm_is_offered_for_an_unknown_one(kind, name, near):
    assert problem_of(Registry(discover()).find, kind, name).nearest == near


def test_one_name_of_two_distributions_is_refused_with_both_spellings(registry, make_distribution):
    make_distribution("grpox-zoo", FOO.replace("grpox_foo", "grpox_zoo"))
    registry = Registry(discover())
    problem = problem_of(registry.find, "loss", "foo")
    assert "grpox-foo 1.0 and grpox-zoo 1.0" in problem.what
    assert problem.allowed == "grpox-foo:foo or grpox-zoo:foo"
    assert registry.find("loss", "grpox-zoo:foo").distribution == "grpox-zoo"
    assert registry.find("loss", "Grpox_Foo:foo").distribution == "grpox-foo"


def test_an_offer_that_cannot_be_used_here_is_refused_with_its_reason(registry):
    for name, reason in (("newer", "plugin API 99"), ("lacking", "pip install 'nothing-such>=1'")):
        problem = problem_of(registry.find, "loss", name)
        assert f"'{name}' of grpox-foo 1.0 cannot be used" in problem.what
        assert reason in problem.what


def test_a_broken_plugin_is_reported_with_its_error_where_it_might_offer_the_name(make_distribution):
    make_distribution("grpox-bad", BAD)
    assert Registry(discover()).find("loss", "dapo").distribution == "grpox"
    with pytest.raises(ConfigError, match="might offer it, but is disabled") as caught:
        Registry(discover(disable=["grpox"])).parse("loss", ComponentRef(name="wanted"), "loss")
    for fact in ("grpox-bad 1.0 might offer it", "broken: ModuleNotFoundError"):
        assert fact in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    make_distribution("grpox-worse", "1 / 0")
    told = refused(Registry(discover()).find, "loss", "Grpox.Bad:wanted")
    assert ["grpox-bad" in problem.what for problem in told[1:]] == [True]


def test_every_mistake_in_parameters_is_told_with_key_and_allowed_values(registry, tmp_path):
    told = parse_problems(registry, name="foo", clip_lo=1, schedule={"warmth": 1})
    assert set(told) == {"loss.clip_lo", "loss.schedule.warmth"}
    assert told["loss.clip_lo"].nearest == "clip_low"
    assert told["loss.clip_lo"].allowed == "clip_low, level, schedule"
    assert told["loss.schedule.warmth"].allowed == "warm"
    told = parse_problems(registry, kind="reward", key="rewards[1]", name="foo", weigth=2)
    assert told["rewards[1].weigth"].nearest == "weight"
    assert "has no parameters" in parse_problems(registry, name="bare", clip_low=1)["loss.clip_low"].what
    assert parse_problems(registry, key="train.optimizer", name="nothing")["train.optimizer"].given == "nothing"
    assert list(parse_problems(registry, path=f"{tmp_path}/none.py:Mine")) == ["loss"]
    for name, what in (("bad-config", "No module named"), ("no-model", "not a pydantic model")):
        told = parse_problems(registry, name=name)["loss"].what
        assert f"'{name}' of grpox-foo 1.0" in told
        assert what in told


def test_a_config_that_uses_a_key_of_the_run_file_is_refused(make_distribution):
    source = FOO.replace("grpox_foo", "grpox_hides").replace("clip_low: float", "weight: float")
    make_distribution("grpox-hides", source)
    registry = Registry(discover(disable=["grpox"]))
    told = parse_problems(registry, kind="reward", key="rewards[0]", name="foo")
    assert "keys weight" in told["rewards[0]"].what
    assert registry.parse("loss", ComponentRef(name="foo", weight=0.5), "loss").config.weight == 0.5


def test_a_validator_that_crashes_is_a_config_error(registry, monkeypatch):
    def crash(*_, **__):
        raise KeyError("gone")

    model = SimpleNamespace(model_validate=crash, model_fields={})
    monkeypatch.setattr(registry, "config_model", lambda offer: model)
    assert "KeyError: 'gone'" in parse_problems(registry, name="foo")["loss"].what


def test_a_path_is_a_component_with_a_nested_config(registry, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    bound = registry.parse("loss", ComponentRef(path=f"{file}:Mine", cap=3), "loss")
    assert (bound.label, bound.offer, bound.needs) == ("Mine", None, ("entropy",))
    assert registry.build(bound).cap == 3.0
    assert set(parse_problems(registry, path=f"{file}:Mine", kap=3)) == {"loss.kap"}


LOSS = {"per_token": print, "reduction": Reduction.TOKEN_MEAN}


@pytest.mark.parametrize(
    ("kind", "members", "what"),
    [
        ("loss", {}, "has no method per_token"),
        ("loss", {"per_token": print}, "has the reduction None"),
        ("loss", {**LOSS, "scope": "batch"}, "has the scope 'batch'; it is 'token' or 'group'"),
        ("loss", {**LOSS, "level": "word"}, "has the level 'word'; it is 'token' or 'sequence'"),
        ("correction", {"correct": print, "level": "word"}, "has the level 'word'"),
        *(
            ("correction", {"correct": print, "needs": needs}, "needs of Mine must be a tuple of strings")
            for needs in ("entropy", (1,), 3)
        ),
        ("advantage", {"scale": 3}, "has no method scale"),
        ("generator", {"generate": print, "sync": print}, "has no method start and no method sleep"),
    ],
)
def test_an_object_that_is_no_component_of_its_kind_is_refused_when_it_is_named(kind, members, what):
    problem = problem_of(bind_object, kind, type("Mine", (), members), {}, kind, "Mine")
    assert what in problem.what
    assert problem.key == kind


def test_what_a_loss_declares_may_be_a_property_and_is_checked_once_it_is_built(registry):
    members = {"per_token": print, "reduction": property(lambda self: Reduction.SEQUENCE_SUM), "level": None}
    bound = bind_object("loss", type("Mine", (), members), {}, "loss", "Mine")
    assert registry.build(bound).reduction is Reduction.SEQUENCE_SUM
    members["scope"] = property(lambda self: "batch")
    bound = bind_object("loss", type("Mine", (), members), {}, "loss", "Mine")
    assert "has the scope 'batch'" in refused(registry.build, bound)[0].what


def test_a_class_is_built_with_its_config_or_with_nothing(registry):
    bound = registry.parse("loss", ComponentRef(name="foo", clip_low="0.5"), "loss")
    assert (bound.label, bound.needs, bound.offer.distribution) == ("foo", ("entropy",), "grpox-foo")
    assert registry.build(bound).config.clip_low == 0.5
    bare = registry.build(registry.parse("loss", ComponentRef(name="bare"), "loss"))
    assert type(bare).__name__ == "Bare"
    reward = registry.build(registry.parse("reward", RewardRef(name="short", weight=2), "rewards[0]"))
    assert reward(completions=["a"]) == [1.0]


@pytest.mark.parametrize(
    ("kind", "name", "what"),
    [
        ("loss", "raises", "cannot be built: ValueError: no luck"),
        ("loss", "quits", "cannot be built: GeneratorExit"),
        ("loss", "absent", "cannot be built: AttributeError"),
        ("loss", "function", "is not a class"),
        ("loss", "empty", "has no method per_token"),
        ("loss", "no-reduction", "has the reduction 'token_mean'; it must be a grpox.contracts.Reduction"),
        ("reward", "number", "is not a class, or a function"),
    ],
)
def test_what_cannot_be_built_is_named_with_the_original_error(registry, kind, name, what):
    bound = registry.parse(kind, ComponentRef(name=name), "here")
    problem = problem_of(registry.build, bound)
    assert f"{kind} '{name}' of grpox-foo 1.0 {what}" in problem.what
    assert problem.key == "here"


def test_a_component_that_says_the_run_failed_is_believed(registry):
    gone = BoundComponent("generator", "remote", "generator", load=Mock(side_effect=RunFailed("it is gone")))
    with pytest.raises(RunFailed, match="it is gone"):
        registry.build(gone)


def bound(kind, label, needs=(), provides=()):
    return BoundComponent(kind, label, kind, load=object, needs=needs, provides=provides)


def test_an_unmet_need_says_who_needs_it_who_would_provide_it_and_the_nearest(registry):
    correction = bound("correction", "tis", needs=("logprobs", "steps"))
    assert registry.negotiate([correction, bound("generator", "g", provides=("logprobs",))], ["steps"]) == []
    (problem,) = registry.negotiate([correction], ["steps"])
    assert problem.what.startswith("correction 'tis' needs 'logprobs'")
    assert "generator 'oracle' (needs nothing-such: not installed" in problem.what
    assert problem.allowed == "provided are steps"
    assert problem.key == "correction"
    (problem,) = registry.negotiate([bound("loss", "mine", needs=("entropyy",))], ["entropy"])
    assert "no installed component provides it" in problem.what
    assert problem.nearest == "entropy"


def test_required_plugins_must_be_installed_new_enough_and_loaded(registry, make_distribution):
    make_distribution("grpox-bad", BAD)
    required = ["grpox-foo>=1.0", "grpox-foo>=2", "grpox-none", "grpox-bad", "pluggy"]
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": ["format"]}
    config = RunConfig.model_validate({**sections, "plugins": {"required": required}})
    context = CheckContext(config, {}, discover(), RunObjects())
    told = {problem.key: problem.what for problem in missing_plugins(context)}
    assert set(told) == {f"plugins.required[{index}]" for index in (1, 2, 3, 4)}
    assert "1.0 is installed" in told["plugins.required[1]"]
    assert "not installed" in told["plugins.required[2]"]
    assert "is broken: ModuleNotFoundError" in told["plugins.required[3]"]
    assert "no grpox plugin" in told["plugins.required[4]"]


def test_the_public_function_builds_a_component_as_a_run_file_would(tmp_path):
    loss = grpox.build("loss", "dapo", {"clip_low": 0.1, "clip_high": 0.28})
    zeros, ones = torch.zeros(1, 1), torch.ones(1, 1)
    inputs = LossInputs(zeros + 0.5, zeros, ones, ones.bool())  # the ratio is e^0.5, clipped to 1.28
    assert loss.per_token(inputs).loss.item() == pytest.approx(-1.28)
    file = tmp_path / "mine.py"
    file.write_text("def longest(completions, **_):\n    return [float(len(text)) for text in completions]\n")
    assert grpox.build("reward", f"{file}:longest")(completions=["ab", ""]) == [2.0, 0.0]
    problem = problem_of(grpox.build, "los", "dapo")
    assert (problem.what, problem.nearest) == ("no such kind of component", "loss")


def test_a_file_imports_its_neighbours_and_its_classes_pickle(tmp_path):
    (tmp_path / "my_neighbour.py").write_text("VALUE = 7\n")
    (tmp_path / "mine.py").write_text("from my_neighbour import VALUE\nclass Thing:\n    value = VALUE\n")
    thing = load_object("mine.py:Thing", tmp_path)
    assert pickle.loads(pickle.dumps(thing())).value == 7
    assert load_object(f"{tmp_path}/mine.py:Thing") is thing


def test_two_files_of_one_name_stay_apart_and_one_may_take_its_folder_off_the_path(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        remove = f"import sys\nsys.path.remove({str(tmp_path / folder)!r})\n"
        (tmp_path / folder / "same.py").write_text(f"{remove}WHERE = '{folder}'\n")
    assert [load_object(f"{tmp_path}/{f}/same.py:WHERE") for f in "ab"] == ["a", "b"]


@pytest.mark.parametrize(
    ("code", "told", "line"),
    [
        ("x = 1\ny = x / 0\n", "ZeroDivisionError: division by zero", 2),
        ("def f(:\n", "SyntaxError", 1),
        ("import missing_module_xyz\n", "ModuleNotFoundError", 1),
        ("\n\nraise SystemExit(3)\n", "SystemExit: 3", 3),
    ],
)
def test_a_file_that_raises_is_reported_with_its_line(tmp_path, code, told, line):
    (tmp_path / "bad.py").write_text(code)
    problem = problem_of(load_object, f"{tmp_path}/bad.py:f")
    assert told in problem.what
    assert problem.where == f"{tmp_path}/bad.py:{line}"


def test_slips_in_the_reference(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(): ...\n")
    assert problem_of(load_object, f"{tmp_path}/mine.py:rewrad").nearest == "reward"
    assert problem_of(load_object, f"{tmp_path}/mien.py:reward").nearest == "mine.py"
    assert problem_of(load_object, f"{tmp_path}/mine.py").allowed == "path.py:name"
    assert problem_of(load_object, f"{tmp_path}/mine.txt:reward").what.endswith("is not a .py file")
