"""The model and generator of a run, loaded without training: for an evaluation, and to try a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.policy.models import load_model
from grpox.policy.precision import prepare_cuda
from grpox.rollout.sampler import CompletionSampler, FixedPolicy
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World, on_every_rank, translate_lost_ranks
from grpox.training.inputs import decide_longest, generator_context, open_generator, start_sampler

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun
    from grpox.training.episodes import RunEpisodes


@contextmanager
def sampler_of_model(
    run: ResolvedRun,
    world: World,
    times: PhaseTimes,
    tokenizer: PreTrainedTokenizerBase,
    episodes: RunEpisodes | None,
    checkpoint: Path | None = None,
) -> Iterator[CompletionSampler]:
    """Load the model of a run and start its generator, which ends with the block; a collective.

    Args:
        episodes: gives completions several turns; None: each is one turn.
        checkpoint: a checkpoint whose weights replace those of `model.path`.

    Raises:
        ConfigError: the model does not fit or cannot be loaded, or the generator cannot be used here.
    """
    decide_longest(run)
    generator = open_generator(run, world)

    def load() -> PreTrainedModel:
        if checkpoint is None:
            model = load_model(run.config.model)
        else:
            # Imported here, because it imports DeepSpeed.
            from grpox.checkpoint.export import checkpoint_model

            model = checkpoint_model(checkpoint, run.config.model)
        return model.eval().requires_grad_(False).to(world.device)

    with translate_lost_ranks(world, times):
        model = on_every_rank(world, times, times.phase("load")(load))
        prepare_cuda(model, world.device)
        context = generator_context(model, tokenizer, run.config, world)
        loop = None if episodes is None else episodes.loop(world, times, context.stop_token_ids)
        policy = FixedPolicy(model)
        sampler = start_sampler(generator, context, policy, world, times, sleeps=False, episodes=loop)
        try:
            yield sampler
        finally:
            generator.close()
