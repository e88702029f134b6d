"""Under which names tied embeddings are loaded into vLLM's model."""

from __future__ import annotations

import pytest
from torch import nn

from grpox_vllm_serving.weight_reload import as_loaded, head_is_embedding

POLICY = [("model.embed_tokens.weight", 1), ("model.norm.weight", 2)]


class Model(nn.Module):
    """Named as vLLM names the parts of a language model."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(3, 2)})
        self.lm_head = nn.Linear(2, 3, bias=False)
        if tied:
            self.lm_head.weight = self.model["embed_tokens"].weight


@pytest.mark.parametrize("tied", [False, True])
def test_one_parameter_is_found_by_identity(tied: bool) -> None:
    assert head_is_embedding(Model(tied)) == tied
    assert head_is_embedding(nn.Linear(1, 1)) is None


@pytest.mark.parametrize(
    ("tied", "one_parameter", "loaded"),
    [
        (False, False, POLICY),
        (True, False, [POLICY[0], ("lm_head.weight", 1), POLICY[1]]),
        (True, True, [("lm_head.weight", 1), POLICY[1]]),
        (True, None, POLICY),  # as vLLM has Gemma 2
    ],
)
def test_tied_embeddings_are_loaded_once_where_one_parameter_holds_them(
    tied: bool, one_parameter: bool | None, loaded: list[tuple[str, int]]
) -> None:
    assert list(as_loaded(POLICY, tied, one_parameter)) == loaded
