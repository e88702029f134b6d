"""Sampling during the update, with a generator that notes what it is asked for and when."""

from types import SimpleNamespace

import pytest
from test_sampler import ALONE

from grpox.checkpoint.progress import TrainingState
from grpox.checkpoint.rank_state import prefetched_of, prefetched_state, rank_state, read_state, write_state
from grpox.config import SamplingConfig
from grpox.contracts import Episode, Prompt, Rollout, ToolCall, ToolResult, Turn
from grpox.data.schedule import BatchPlan, PromptSampler, Schedule
from grpox.errors import RunFailed
from grpox.rollout.collector import Collector, Scorer, sample_and_score
from grpox.rollout.rewards import NamedReward
from grpox.rollout.sampler import CompletionSampler, PrefetchedBatch, SampleRequest
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.phases import PhaseTimes
from grpox.training.generation_feed import GenerationFeed
from grpox.training.step_report import StepReport
from grpox.training.trainer import Trainer
from grpox_advantages.configs import GroupConfig
from grpox_advantages.scalers import Group


class Prompts:
    """As many as are asked for; number i is the token i + 1."""

    conversational = False

    def token_ids(self, index):
        return (index + 1,)

    def prompt_texts(self, token_ids):
        return [str(ids[0] - 1) for ids in token_ids]

    def rows(self, indices):
        return [str(index) for index in indices], {}

    def columns_of(self, indices):
        return [{} for _ in indices]

    def questions(self, indices):
        return list(map(str, indices))

    def completion_texts(self, sequences):
        return [" ".join(map(str, ids)) for ids in sequences]


class Ahead:
    """Notes its calls. A rollout's tokens are those of its prompt, the weights' version and the seed."""

    def __init__(self, error=None, sleeps=False):
        self.error, self.sleeps = error, sleeps
        self.version, self.calls = None, []

    def sync(self, weights, version):
        list(weights)
        self.version = version
        self.calls.append(f"sync {version}")

    def generate(self, prompts, sampling, seed):
        self.calls.append(f"generate with {self.version}")
        return self.drawn(prompts, seed)

    def begin(self, prompts, sampling, seed):
        self.calls.append(f"begin with {self.version}")
        drawn = self.drawn(prompts, seed)

        def arriving():
            yield from drawn
            if self.error:
                raise self.error

        return arriving()

    def drawn(self, prompts, seed):
        return [
            Rollout(p.group_id, s, p.token_ids, (p.token_ids[0], s + 1, 1 + seed % 9), "stop", self.version)
            for p in prompts
            for s in range(p.num_samples)
        ]

    def wake(self):
        self.calls += ["wake"] * self.sleeps

    def sleep(self):
        self.calls += ["sleep"] * self.sleeps


class Policy:
    """An update that only counts."""

    def __init__(self, engine, calls):
        self.engine, self.calls = engine, calls

    def score_old(self, micro_batches): ...

    def step(self, micro_batches):
        self.calls.append(f"update {self.engine.steps + 1}")
        self.engine.steps += 1
        return {"loss": 0.5}


class Evaluation:
    config = SimpleNamespace(every=2)

    def __init__(self, sampler, scorer):
        self.sampler, self.scorer = sampler, scorer

    def is_due(self, step, total_steps):
        return step == total_steps or step % self.config.every == 0

    def evaluate(self, state):
        request = SampleRequest(Prompts(), [0], 1, SamplingConfig(), (1, state.global_step))
        sample_and_score(self.sampler, self.scorer, request, state)
        return {"accuracy": 0.0}


class Observed:
    """Return the reports of each step to the observers."""

    def __init__(self):
        self.failures, self.metrics, self.versions = {}, [], []

    def rollouts_scored(self, context, step, scored):
        self.versions.append({each.rollout.policy_version for each in scored})

    def step_finished(self, context, step, metrics, control):
        self.metrics.append(metrics)

    def evaluated(self, context, step, metrics, control): ...


def length(completions, log_metric, **_):
    log_metric("loss", 42.0)  # a name of the trainer's own
    return [float(len(text)) for text in completions]


def trainer(
    generator=None, *, steps, max_staleness=1, evaluate=False, per_generation=1, accumulation=1, sleeps=False
):
    """Two prompts of two completions a micro-batch."""
    engine = SimpleNamespace(steps=0, weights=lambda: iter(()))
    generator = generator or Ahead(sleeps=sleeps)
    sampler = CompletionSampler(engine, generator, ALONE, seed=0)
    scorer = Scorer([NamedReward("length", length)], streaming=True)
    scaler, stale = Group(GroupConfig()), max_staleness > 0
    collector = Collector(sampler, scorer, Prompts(), scaler, SamplingConfig(), 2, prefetches=stale)
    plan = BatchPlan(1, 4, accumulation, per_generation, 2)
    prompts = PromptSampler(100, plan.prompts_per_generation, True, 0)
    return trainer_of(
        collector,
        Schedule(plan, prompts, max_steps=steps),
        Policy(engine, generator.calls),
        max_staleness=max_staleness,
        evaluator=Evaluation(sampler, scorer) if evaluate else None,
    )


def trainer_of(collector, schedule, policy, max_staleness=0, evaluator=None, cursor=None):
    """The loop with its own parts, but for a policy that only counts and observers that note."""
    train = SimpleNamespace(
        max_staleness=max_staleness,
        old_logprobs="policy",
        mask_truncated_completions=False,
        deterministic=False,
    )
    context = SimpleNamespace(config=SimpleNamespace(train=train))
    state, observers = TrainingState(cursor=cursor), Observed()
    trainer = Trainer(
        context=context,
        world=ALONE,
        schedule=schedule,
        state=state,
        feed=GenerationFeed(train, schedule, collector, state, ALONE),
        policy=policy,
        evaluator=evaluator,
        observers=observers,
        report=StepReport(
            context, state, collector, observers, WarnOnce(get_logger("grpox.test")), is_main=True
        ),
        components=SimpleNamespace(has_begin_step=False, has_end_step=False),
        steering=SimpleNamespace(apply=lambda: None, control=None),
        checkpoints=SimpleNamespace(after_step=lambda *_, **__: None, finish=lambda: None),
        times=collector.sampler.times,
    )
    trainer._is_first = False  # its policy has no log-probabilities to compare
    return trainer


ON_DEMAND = {"max_staleness": 0}


@pytest.mark.parametrize(
    ("settings", "calls", "staleness"),
    [
        # The next batch is begun before each update, and none after the last.
        (
            {"steps": 3},
            "sync 0, generate with 0, begin with 0, update 1, sync 1, begin with 1, update 2, update 3",
            [0, 1, 1],
        ),
        (
            {"steps": 2, **ON_DEMAND},
            "sync 0, generate with 0, update 1, sync 1, generate with 1, update 2",
            [None, None],
        ),
        # A batch of two steps is two steps old.
        (
            {"steps": 4, "per_generation": 2},
            "sync 0, generate with 0, begin with 0, update 1, update 2, update 3, update 4",
            [0, None, 2, None],
        ),
        # Of two batches of a step the first is begun.
        (
            {"steps": 2, "accumulation": 2},
            "sync 0, generate with 0, generate with 0, begin with 0, update 1, "
            "sync 1, generate with 1, update 2",
            [0, 0.5],
        ),
        # An evaluation in between is of the weights of then.
        (
            {"steps": 3, "evaluate": True},
            "sync 0, generate with 0, generate with 0, begin with 0, update 1, sync 1, begin with 1, update 2, "
            "sync 2, generate with 2, update 3, sync 3, generate with 3",
            [0, 1, 1],
        ),
        # It sleeps when training follows, and never between: the evaluation after step 2 and the next batch
        # are of one set of weights.
        (
            {"sleeps": True, "steps": 4, "evaluate": True, "per_generation": 2, **ON_DEMAND},
            "sync 0, wake, generate with 0, wake, generate with 0, sleep, update 1, update 2, "
            "sync 2, wake, generate with 2, wake, generate with 2, sleep, update 3, update 4, "
            "sync 4, wake, generate with 4",
            [None] * 4,
        ),
        # Woken for an evaluation, it sleeps before an update that needs no samples.
        (
            {"sleeps": True, "steps": 4, "evaluate": True, "per_generation": 4, **ON_DEMAND},
            "sync 0, wake, generate with 0, wake, generate with 0, sleep, update 1, update 2, "
            "sync 2, wake, generate with 2, sleep, update 3, update 4, sync 4, wake, generate with 4",
            [None] * 4,
        ),
        # It does not sleep once a batch is begun ahead.
        (
            {"sleeps": True, "steps": 2},
            "sync 0, wake, generate with 0, sleep, wake, begin with 0, update 1, sleep, update 2",
            [0, 1],
        ),
    ],
    ids=["ahead", "on demand", "two steps", "two batches", "evaluation", "sleeps", "evaluated", "awake"],
)
def test_what_a_run_asks_of_its_generator_and_when(settings, calls, staleness, logged):
    run = trainer(**settings)
    run.run()
    assert run.policy.calls == calls.split(", ")
    assert [metrics.get("sampling/staleness") for metrics in run.observers.metrics] == staleness
    assert run.state.prefetched == {}
    assert {metrics["loss"] for metrics in run.observers.metrics} == {0.5}  # the trainer's own
    assert run.observers.metrics[0]["length/loss"] == 42.0
    assert logged().count("warning: reward 'length' logs 'loss'") == 1
    if staleness == [0, 1, 1]:
        assert run.observers.versions == [{0}, {0}, {1}]


def test_what_failed_in_the_background_is_told():
    with pytest.raises(RunFailed, match="no such token"):
        trainer(Ahead(error=RunFailed("no such token")), steps=2).run()


def test_a_generator_without_the_method_is_told():
    class Without(Ahead):
        @property
        def begin(self):
            raise AttributeError

    with pytest.raises(RunFailed, match="no method 'begin'"):
        trainer(Without(), steps=2).run()


def rollouts(groups):
    return [
        Rollout(group, sample, (group, 7), (5,) * sample, "length", 3, (-0.1,) * sample, (True,) * sample)
        for group in groups
        for sample in range(2)
    ]


def test_a_checkpoint_holds_what_was_begun(tmp_path):
    turns = (Turn(0, 1, "stop", 4, 0.5, "state"), Turn(2, 3, "done", 4))
    extra = {"score": 0.1, "steps": [1, ("a", None)], "more": {"won": True}}
    conversation = Episode(
        "lake",
        ({"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}),
        (ToolResult(ToolCall("move", '{"x": 1}'), "water", "timeout", 0.25, 1),),
        cut=3,
        rewards={"": 0.5},
        weight=2.0,
        info={"success": False, "path": [1, 2]},
        times=((0.0, 0.5), (0.75, 1.0)),
        failure="ValueError",
        lost="killed",
    )
    episode = Rollout(
        2, 1, (1,), (2, 3, 4), "won", 4, (0.1, 0.2, 0.3), (True, False, True), turns, extra, conversation
    )
    held = [*rollouts([0, 1]), Rollout(2, 0, (1,), (2,), "stop", 4), episode]
    state = TrainingState(prefetched={5: PrefetchedBatch(3, iter(held))})
    write_state(rank_state(state, ALONE, PhaseTimes()), tmp_path / "rank.pt")
    again = prefetched_of([read_state(tmp_path / "rank.pt")["prefetched"][5]], 0, 1)
    assert again.version == 3
    assert list(again) == held == list(state.prefetched[5])


def test_what_was_begun_is_dealt_to_other_ranks_as_prompts_are():
    states = [prefetched_state(PrefetchedBatch(3, iter(rollouts(range(rank, 6, 2))))) for rank in range(2)]
    for size in (1, 3):
        for rank in range(size):
            dealt = list(prefetched_of(states, rank, size))
            order = sorted(dealt, key=lambda rollout: (rollout.group_id, rollout.sample))
            assert order == rollouts(range(rank, 6, size))


def test_prompts_of_what_was_begun_are_the_schedules():
    run = trainer(Ahead(), steps=2)
    asked = []
    generator = run.feed.collector.sampler.generator
    begin = generator.begin
    generator.begin = lambda prompts, *more: asked.append(prompts) or begin(prompts, *more)
    run.run()
    indices = run.schedule.sampler.prompts_for(1)
    assert asked == [[Prompt(group, (index + 1,), 2, row=index) for group, index in enumerate(indices)]]
