"""`train.router_aux_loss_coef` in a run: without any advantage, the gradient is that of transformers' loss."""

from support.processes import run

SCRIPT = """
import copy
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
import grpox


def nothing(completions, **columns):
    return [0.0] * len(completions)


class Followed:
    def grpox_rollouts_scored(self, rollouts):
        self.sequences = [list(r.rollout.prompt_ids) + list(r.rollout.completion_ids) for r in rollouts]


torch.manual_seed(0)
settings = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, vocab_size=17,
)
fresh = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **settings), dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained("quickstart/model")
rows = [{"prompt": f"{n}+{n}="} for n in range(8, 12)]


def stepped(name, **train):
    config = {
        "model": {"path": "quickstart/model"},
        "train": {"max_steps": 1, "per_device_train_batch_size": 16, "num_generations": 8} | train,
        "sampling": {"max_completion_length": 4},
        "tracking": {},
        "output_dir": f"runs/{name}",
    }
    followed = Followed()
    others = dict(tokenizer=tokenizer, dataset=rows, rewards=nothing, callbacks=[followed])
    with grpox.Run(config, model=copy.deepcopy(fresh), **others) as run:
        return run.step(), followed


metrics, followed = stepped("routers", router_aux_loss_coef=0.5)
other, _ = stepped("checkpointing", router_aux_loss_coef=0.5, gradient_checkpointing=True)
without, _ = stepped("without")
assert "router_aux_loss" not in without and without["grad_norm"] == 0, without
balance = metrics["router_aux_loss"]
assert abs(metrics["loss"] - 0.5 * balance) < 1e-6 and abs(metrics["policy_loss"]) < 1e-6, metrics
assert abs(other["grad_norm"] / metrics["grad_norm"] - 1) < 1e-4, (other["grad_norm"], metrics["grad_norm"])
longest = max(map(len, followed.sequences))
ids = torch.tensor([each + [0] * (longest - len(each)) for each in followed.sequences])
mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in followed.sequences])
expected = fresh(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
assert abs(float(expected) - balance) < 1e-5, (float(expected), balance)
(0.5 * expected).backward()
norm = torch.cat([p.grad.flatten() for p in fresh.parameters() if p.grad is not None]).norm()
assert abs(metrics["grad_norm"] / float(norm) - 1) < 1e-4, (metrics["grad_norm"], float(norm))
print("fine")
"""


def test_a_run_balances_the_experts(grpox, folder):
    assert grpox("recipes", "copy", "quickstart").returncode == 0
    (folder / "script.py").write_text(SCRIPT)
    done = run("script.py", cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "fine" in done.stdout.split()
