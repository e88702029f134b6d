"""Components of trial/ conform, and compute the numbers that are worked out here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from statistics import mean
from threading import Thread
from typing import Any

import pytest
import torch
from contract.planted import references as paper

from grpox.contracts import AdvantageInputs, StepContext, Turn
from grpox.plugins.registry import bind, installed
from grpox.testing import same_as
from grpox.testing.runner import SUITES, outcomes

TRIAL = Path(__file__).parent / "trial"
COMPONENTS = [
    *(("loss", f"losses.py:{name}") for name in ("GspoToken", "Gmpo", "QuantileClip", "ReferencePenalty")),
    *(("loss", f"losses.py:{name}") for name in ("EntropyRegularised", "RewardWeighted", "PairsOfAGroup")),
    *(
        ("advantage", f"advantages.py:{name}")
        for name in ("Rloo", "RunningStd", "QuantileBaseline", "ByDifficulty", "RewardToGo")
    ),
    *(("correction", f"corrections.py:{name}") for name in ("IcePop", "SequenceCap")),
    *(("reward", f"rewards.py:{name}") for name in ("Digits", "close")),
    *(("observer", f"observers.py:{name}") for name in ("Patience", "TargetKl")),
    ("generator", "generators.py:AsksAgain"),
    ("optimizer", "training.py:Lion"),
    ("scheduler", "training.py:Restarts"),
]


def mention(name: str, **parameters: Any) -> dict[str, Any]:
    return {"path": f"{TRIAL}/{name}", **parameters}


def build(kind: str, name: str, **parameters: Any) -> Any:
    return installed().build(bind(kind, mention(name, **parameters)))


@pytest.mark.parametrize(("kind", "name"), COMPONENTS)
def test_it_conforms(kind: str, name: str) -> None:
    suite = type("Suite", (SUITES[kind],), {"component": mention(name), "columns": {"difficulty": 0.5}})()
    assert [(each.check, each.what) for each in outcomes(suite) if each.status == "failed"] == []


# -- Losses ----------------------------------------------------------------------------------------------


def with_k2(
    logprobs: list[float], old_logprobs: list[float], advantages: list[float], reference_logprobs: list[float]
):
    rows = zip(logprobs, old_logprobs, advantages, reference_logprobs, strict=True)
    return [-math.exp(new - old) * a + 0.05 * (ref - new) ** 2 / 2 for new, old, a, ref in rows]


def pairwise(logprobs: list[Any], old_logprobs: list[Any], advantages: list[Any], group_ids: list[int]) -> Any:
    scores = [sum(new) - sum(old) for new, old in zip(logprobs, old_logprobs, strict=True)]
    quality = [mean(row) if row else 0.0 for row in advantages]
    losses = [
        sum(
            math.log(1 + math.exp(-0.1 * (scores[i] - scores[j])))
            for j in range(len(scores))
            if group_ids[i] == group_ids[j] and quality[i] > quality[j]
        )
        for i in range(len(scores))
    ]
    return [[loss] * len(row) for loss, row in zip(losses, logprobs, strict=True)]


SEQUENCES = paper.sequence_mean


@pytest.mark.parametrize(
    ("component", "reference", "reduction"),
    [
        (mention("losses.py:GspoToken", low=0.2, high=0.2), paper.gspo_token_gradient(0.2, 0.2), SEQUENCES),
        (mention("losses.py:Gmpo"), paper.gmpo(0.4), SEQUENCES),
        (mention("losses.py:ReferencePenalty"), with_k2, paper.token_mean),
        (mention("losses.py:EntropyRegularised"), paper.with_entropy, paper.token_mean),
        (mention("losses.py:PairsOfAGroup"), pairwise, SEQUENCES),
    ],
    ids=lambda value: Path(value["path"]).name if isinstance(value, dict) else "",
)
def test_a_loss_is_the_formula(component: Any, reference: Any, reduction: Any) -> None:
    same_as("loss", component, reference, reduction)


@pytest.mark.parametrize(
    ("kind", "component", "reference"),
    [
        ("advantage", mention("advantages.py:Rloo"), paper.leave_one_out),
        ("correction", mention("corrections.py:IcePop"), paper.icepop(0.5, 5.0)),
    ],
    ids=lambda value: Path(value["path"]).name if isinstance(value, dict) else "",
)
def test_it_is_the_formula(kind: str, component: Any, reference: Any) -> None:
    same_as(kind, component, reference)


def test_clip_bounds_follow_the_quantiles_of_the_ratios() -> None:
    loss = build("loss", "losses.py:QuantileClip", share=0.25, decay=0.5)
    loss.end_step({"ratio": torch.tensor([0.6, 0.8, 1.0, 1.2, 1.4])})
    assert (loss.low, loss.high) == (pytest.approx(0.5 * 0.8 + 0.5 * 0.8), pytest.approx(0.5 * 1.2 + 0.5 * 1.2))
    loss.end_step({"ratio": torch.ones(5)})  # never narrower than 1 %
    assert (loss.low, loss.high) == (pytest.approx(0.4 + 0.495), pytest.approx(0.6 + 0.505))
    other = build("loss", "losses.py:QuantileClip")
    other.load_state_dict(loss.state_dict())
    assert (other.low, other.high) == (loss.low, loss.high)


# -- Advantages ------------------------------------------------------------------------------------------


def batch(rewards: list[float], groups: list[int], **more: Any) -> AdvantageInputs:
    count = len(rewards)
    return AdvantageInputs(
        rewards=torch.tensor(rewards).unsqueeze(1),
        weights=torch.ones(1),
        group_ids=torch.tensor(groups),
        prompt_ids=torch.tensor(groups),
        lengths=torch.full((count,), 3),
        model_masks=[torch.ones(3, dtype=torch.bool)] * count,
        columns=more.pop("columns", {}),
        step=1,
        turns=[(Turn(0, 3, "stop", 0),)] * count,
        **more,
    )


def test_a_running_standard_deviation_is_corrected_for_its_start() -> None:
    scaler = build("advantage", "advantages.py:RunningStd", decay=0.5)
    first = scaler.scale(batch([0.0, 2.0, 5.0, 5.0], [0, 0, 1, 1]))
    # Differences -1, 1, 0, 0: mean square 1/2, which the correction for the start leaves.
    assert first.tolist() == pytest.approx([-1 / (0.5**0.5 + 1e-4), 1 / (0.5**0.5 + 1e-4), 0, 0])
    second = scaler.scale(batch([0.0, 4.0, 0.0, 4.0], [0, 0, 1, 1]))
    # Mean squares 1/2 and 4: (0.25 * 0.5 + 0.5 * 4) / 0.75
    assert second[1].item() == pytest.approx(2 / ((2.125 / 0.75) ** 0.5 + 1e-4))


def test_a_baseline_may_be_a_quantile_of_the_group() -> None:
    scaler = build("advantage", "advantages.py:QuantileBaseline", quantile=0.75)
    rewards = torch.tensor([[0.0], [1.0], [2.0], [4.0], [math.nan]])
    advantages = scaler.scale(rewards, torch.ones(1), torch.zeros(5, dtype=torch.long))
    assert advantages.tolist() == pytest.approx([-2.5, -1.5, -0.5, 1.5, 0.0])  # the quantile is 2.5


def test_a_column_of_the_data_may_weigh_prompts() -> None:
    scaler = build("advantage", "advantages.py:ByDifficulty")
    advantages = scaler.scale(
        batch([0.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], columns={"difficulty": ["1", "1", "3", "3"]})
    )
    assert advantages.tolist() == pytest.approx([-0.5, 0.5, -1.5, 1.5])


def test_a_token_may_have_the_rewards_after_it() -> None:
    scaler = build("advantage", "advantages.py:RewardToGo")
    of_tokens = [torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 0.0])]
    first, second = scaler.scale(batch([2.0, 0.0], [0, 0], token_rewards={"steps": of_tokens}))
    assert first.tolist() == pytest.approx([1.0, 1.0, 0.0])  # 2, 2, 1 to go, less the mean 1
    assert second.tolist() == pytest.approx([-1.0, -1.0, -1.0])


# -- Corrections and rewards -----------------------------------------------------------------------------


def test_a_cap_may_follow_the_steps() -> None:
    correction = build("correction", "corrections.py:SequenceCap", first=8.0, last=2.0)
    old, sampler, mask = torch.zeros(1, 2), torch.full((1, 2), -2.0), torch.ones(1, 2, dtype=torch.bool)
    caps = []
    for step in (1, 2, 4):
        correction.begin_step(StepContext(step, 4, 0.0))
        caps.append(correction.correct(old, sampler, mask)[0][0, 0].item())
    assert caps == pytest.approx([8.0, 6.0, 2.0])  # e^4 is above each


class _Verdicts(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        self.send_response(500 if text == "crash" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": len(text)}).encode())

    def log_message(self, *arguments: Any) -> None:
        """Keep the tests' output short."""


@pytest.fixture
def judge_url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Verdicts) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_a_judge_scores_in_order_and_its_failure_is_not_hidden(judge_url: str) -> None:
    judge = build("reward", "rewards.py:Judge", url=judge_url)
    assert judge(completions=["four", "", "sixsix"]) == [4.0, 0.0, 6.0]
    with pytest.raises(OSError, match="500"):
        judge(completions=["four", "crash"])


def test_a_process_reward_rates_the_parts_between_separators() -> None:
    reward = build("reward", "rewards.py:Digits")
    assert reward(completions=["1+x+22", ""]) == [[0.5, 0.0, 0.5], [0.0]]


# -- Optimizer, schedule, dataset ------------------------------------------------------------------------


def test_lion_steps_by_the_sign_of_the_interpolated_momentum() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = build("optimizer", "training.py:Lion").build([weight], 0.1)
    for gradient in ([1.0, -1.0], [-0.05, -1.0]):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
    # Momentum 0.01 after the first step: 0.9 * 0.01 - 0.1 * 0.05 is above 0 still.
    assert weight.tolist() == pytest.approx([0.8, 1.2])


def test_a_schedule_restarts() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build("scheduler", "training.py:Restarts", periods=2).build(optimizer, 8)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(2 * [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])


def test_rows_may_come_from_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('prompt,answer\n"1+1=",2\n"a ""quote"", and more",3\n', encoding="utf-8")
    rows = build("dataset", "training.py:FromCsv", file=str(tmp_path / "rows.csv")).load()
    assert list(rows) == [{"prompt": "1+1=", "answer": "2"}, {"prompt": 'a "quote", and more', "answer": "3"}]
