"""What a generator checks of its requests: tokens that end a completion, and the positions there are."""

from __future__ import annotations

from collections.abc import Sequence

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import ConfigError, Problem, RunFailed


def end_ids(sampling: SamplingConfig, stop_token_ids: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """The tokens that end a completion: those of model and tokenizer, and those of the run file.

    Raises:
        ConfigError: one of the run file's is no token of the vocabulary.
    """
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < vocabulary]
    if outside:
        what = "no token of the model's vocabulary"
        given, allowed = ", ".join(map(str, outside)), f"0 to {vocabulary - 1}"
        raise ConfigError(Problem(what, "sampling.stop_token_ids", given=given, allowed=allowed))
    return tuple(dict.fromkeys((*stop_token_ids, *sampling.stop_token_ids)))


def check_length(prompts: Sequence[Prompt], sampling: SamplingConfig, limit: int | None, whose: str) -> None:
    """Refuse what exceeds `limit` positions, those of `whose`; None is no limit.

    Raises:
        RunFailed: the longest prompt and the longest completion allowed do not fit together.
    """
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    if limit is not None and longest + sampling.max_completion_length > limit:
        raise RunFailed(
            f"a prompt of {longest} tokens and sampling.max_completion_length "
            f"{sampling.max_completion_length} are more than the {limit} positions of {whose}"
        )
