"""Sampling with vLLM servers, started by `grpox serve` on other GPUs of this host or on other hosts.

The main process sends the weights; every process sends its own share of the prompts to the servers.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt, Rollout, WeightStream
from grpox.errors import ConfigError, RunFailed
from grpox.runtime.logs import get_logger
from grpox.toolkit import has_float32_head, stream_weights
from grpox_generators.configs import VllmServerConfig
from grpox_generators.server_client import (
    Fleet,
    ServedCompletion,
    ServerClient,
    ServerLost,
    ServerUnfit,
    end_if_signalled,
)
from grpox_generators.server_weights import FileSender, NcclSender, in_lockstep
from grpox_generators.vllm_requests import BROKEN_OFF, request_params, seed_of
from grpox_generators.vllm_weights import as_stored, from_all_ranks
from grpox_vllm_serving.protocol import FLOAT32_HEAD, signature

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = get_logger(__name__)
ROUNDS_WITHOUT_PROGRESS = 3
"""Number of rounds in a row in which all servers may be lost before a single completion has arrived."""
FIRST_BACK_OFF = 0.5
LONGEST_BACK_OFF = 10.0


@dataclass(eq=False)
class PromptRequest:
    """One prompt's group."""

    prompt: Prompt
    params: dict[str, Any]
    """Arguments of vLLM's SamplingParams."""
    delivered: set[int] = field(default_factory=set)
    """Samples that have arrived. A repeated request draws the same samples again, and none is delivered
    twice."""

    @property
    def missing(self) -> int:
        return self.prompt.num_samples - len(self.delivered)


@dataclass(eq=False)
class Member:
    """A server with the current weights."""

    client: ServerClient
    room: int
    """Number of completions in progress there: large enough that the server never waits for a request."""
    outstanding: int = 0


class PendingRequests:
    """Requests to servers, in progress in the fleet's thread from the start; for use by one thread.

    Args:
        tag: the version of the weights that sample, as the servers know it.
    """

    def __init__(
        self, fleet: Fleet, members: Sequence[Member], requests: Sequence[PromptRequest], tag: str, version: int
    ) -> None:
        self.version = version
        self._fleet = fleet
        self._members = list(members)
        self._tag = tag
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda e: isinstance(e, ServerLost) and not isinstance(e, ServerUnfit)),
            stop=stop_after_attempt(fleet.config.retries + 1),
            wait=wait_exponential(multiplier=FIRST_BACK_OFF, max=LONGEST_BACK_OFF),
            reraise=True,
        )
        self._complete = retrying.wraps(self._attempt)
        self._lost: dict[str, str] = {}
        """Address -> reason for which the server gets no more requests."""
        self._inbox = queue.SimpleQueue[tuple[PromptRequest, ServedCompletion] | None]()
        self._work = fleet.loop.start(self._run(requests))
        self._work.add_done_callback(lambda _: self._inbox.put(None))

    def arriving(self) -> Iterator[tuple[PromptRequest, ServedCompletion]]:
        """Yield completions as they end, until all have arrived or no server is left; read it once.

        Raises:
            ConfigError: a server refuses a request.
            RunFailed: a server sends an unusable answer.
        """
        try:
            while True:
                try:
                    item = self._inbox.get(timeout=1.0)
                except queue.Empty:
                    self._end_if_signalled()
                    continue
                if item is None:
                    break
                yield item
            self._work.result()
        finally:
            self.cancel()
        self._give_up_lost()

    def wait(self) -> None:
        """Wait until no request is in progress; answers and errors can still be read."""
        while wait([self._work], timeout=1.0).not_done:
            self._end_if_signalled()
        self._give_up_lost()

    def cancel(self) -> None:
        """Cancel the requests that are still in progress."""
        self._work.cancel()

    def _end_if_signalled(self) -> None:
        end_if_signalled(max((member.client.heard for member in self._members), default=0.0))

    def _give_up_lost(self) -> None:
        """Give each lost server up once: it may come back before all answers are read."""
        while self._lost:
            self._fleet.give_up(*self._lost.popitem())

    async def _run(self, requests: Sequence[PromptRequest]) -> None:
        """Complete `requests`. Requests that are incomplete on return found no server."""
        waiting = deque(requests)
        running: dict[asyncio.Task[None], tuple[Member, PromptRequest]] = {}
        watches = {asyncio.create_task(each.client.watch(self._tag)): each for each in self._members}
        try:
            while waiting or running:
                while waiting and (free := [each for each in self._members if each.outstanding < each.room]):
                    member = min(free, key=lambda each: each.outstanding / each.room)
                    request = waiting.popleft()
                    member.outstanding += request.prompt.num_samples
                    running[asyncio.create_task(self._complete(member, request))] = member, request
                if not running:
                    return
                ended, _ = await asyncio.wait([*running, *watches], return_when=asyncio.FIRST_COMPLETED)
                for watch in [each for each in watches if each in ended]:
                    silent = watches.pop(watch)
                    self._drop(silent, str(watch.exception()))
                    for task, (member, _) in running.items():
                        if member is silent:
                            task.cancel()
                for task in [each for each in running if each in ended]:
                    member, request = running.pop(task)
                    member.outstanding -= request.prompt.num_samples
                    try:
                        task.result()
                    except asyncio.CancelledError:  # its server is silent
                        waiting.append(request)
                    except ServerLost as error:
                        waiting.append(request)
                        self._drop(member, str(error))
        finally:
            for task in (*running, *watches):
                task.cancel()
            # Include tasks that failed meanwhile: asyncio reports errors that nobody retrieves.
            await asyncio.gather(*running, *watches, return_exceptions=True)

    def _drop(self, member: Member, why: str) -> None:
        """Send no more requests to a server."""
        if member in self._members:
            self._members.remove(member)
            self._lost[member.client.url] = why

    async def _attempt(self, member: Member, request: PromptRequest) -> None:
        url = member.client.url
        async for completion in member.client.complete(list(request.prompt.token_ids), request.params):
            if completion.finish_reason in BROKEN_OFF:
                raise ServerLost(f"{url} broke off a completion: {completion.finish_reason}")
            if set(completion.versions) != {self._tag}:
                weights = ", ".join(completion.versions) or "unknown"
                raise ServerUnfit(f"{url} sampled with weights {weights} instead of {self._tag}")
            if len(completion.logprobs) != len(completion.token_ids):
                raise RunFailed(
                    f"{url} sent {len(completion.token_ids)} tokens without their log-probabilities"
                )
            if completion.index not in request.delivered:
                request.delivered.add(completion.index)
                self._inbox.put((request, completion))


class VllmServerGenerator:
    """Samples with one request per prompt for its whole group; completions are returned as they end.

    Requests of a lost server go to the others. If all servers are lost, the run waits until one is started
    again, sends it the weights and requests the missing samples. A sample that is drawn again is the same, and
    counts once.
    """

    stateless = True

    def __init__(self, config: VllmServerConfig) -> None:
        self.config = config
        self.version = 0
        self._sender: FileSender | NcclSender | None = None
        self._begun: list[PendingRequests] = []
        """Requests of `begin` since the last sync."""

    def preflight(self, model: PreTrainedConfig) -> None:
        """Check the servers that answer, before the model is loaded.

        If no server answers because all are still starting, the model is loaded meanwhile, and `start` waits.

        Raises:
            ConfigError: a server has another model or version or refuses the token; or no server answers and
                `start_timeout` is 0.
        """
        with closing(Fleet(self.config, signature(model), path=model.name_or_path)) as fleet:
            if fleet.look():
                return
            if self.config.start_timeout == 0:
                raise ConfigError(fleet.none_answers())
            logger.warning(
                "vllm-server: no server answers yet; loading the model meanwhile: %s\n    start one: %s",
                "; ".join(fleet.lost.values()),
                fleet.serve,
            )

    def start(self, context: GeneratorContext) -> None:
        self.context = context
        policy = context.policy.config
        self._vocabulary = policy.get_text_config().vocab_size
        self._run = from_all_ranks(secrets.token_hex(4), context)[0]
        with self._translate_config_errors():
            self._fleet = Fleet(self.config, signature(policy), context.rank == 0, str(context.model_path))
        if context.rank == 0:
            if not self._fleet.find():
                raise ConfigError(self._fleet.none_answers())
            self._warn_of_dtypes()

    def sync(self, weights: WeightStream, version: int) -> None:
        """Send the weights to every server that answers, including servers that were lost before.

        Requests that began with the earlier weights are completed first.
        """
        if self._begun:
            for pending in self._begun:
                pending.wait()
            self._begun.clear()
            from_all_ranks(None, self.context)  # other ranks also finish their requests first
        self.version = version
        self._fleet.readmit()
        weights = in_lockstep(weights, self.context, self._bucket_bytes)
        try:
            if self.context.rank == 0:
                self._send(weights)
        except Exception:
            self._gather_rest(weights)
            raise
        self._gather_rest(weights)

    def _gather_rest(self, weights: WeightStream) -> None:
        """Go through what is left of a collective, and wait for all ranks, also where sending has failed."""
        for _ in weights:
            pass
        from_all_ranks(None, self.context)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        """Sample every prompt's group; a temperature of 0 decodes greedily. A collective."""
        with self._translate_config_errors():
            requests = self._requests(prompts, sampling, seed)
            rounds = 0
            while True:
                in_before = sum(len(request.delivered) for request in requests)
                # Completions arrive as they end, until all have arrived or no server is left.
                if wanted := [request for request in requests if request.missing]:
                    yield from self._read(self._ask(wanted))
                rounds = 0 if sum(len(request.delivered) for request in requests) > in_before else rounds + 1
                if not any(from_all_ranks(any(request.missing for request in requests), self.context)):
                    return
                if not any(from_all_ranks(rounds < ROUNDS_WITHOUT_PROGRESS, self.context)):
                    raise RunFailed(f"the vLLM servers fail repeatedly: {self._fleet.last_loss}")
                self.sync(stream_weights(self.context.policy), self.version)

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        """Sample as `generate` does, but in the background and without collectives.

        If no server is left, the missing samples are omitted.
        """
        with self._translate_config_errors():
            pending = self._ask(self._requests(prompts, sampling, seed))
        self._begun.append(pending)
        return self._read(pending)

    def sleep(self) -> None:
        """Do nothing: the servers have their own devices."""

    def wake(self) -> None:
        """Do nothing: the servers have their own devices."""

    def close(self) -> None:
        for pending in self._begun:
            pending.cancel()
        if self._sender is not None:
            self._sender.close()
        self._fleet.close()

    @property
    def _tag(self) -> str:
        """The version as servers know it. It includes the run's name, because two runs use the same numbers."""
        return f"{self._run}/{self.version}"

    @property
    def _bucket_bytes(self) -> int:
        return self.config.bucket_mib * 2**20

    def _send(self, weights: WeightStream) -> None:
        fleet = self._fleet
        if not fleet.find():
            raise RunFailed(str(fleet.none_answers()))
        if self._sender is None:
            self._sender = self._new_sender()
        # Only a killed run can have requests in progress here: their completions are awaited.
        fleet.post("/pause?mode=wait")
        # Set the version last: a server with this version is ready.
        fleet.post("/update_weight_version", {"new_version": f"{self._tag}/loading"})
        fleet.post("/collective_rpc", {"method": "forget_weight_update"})
        self._sender.send(as_stored(self.context.policy, weights))
        fleet.post("/reset_prefix_cache")
        fleet.post("/resume")
        fleet.post("/update_weight_version", {"new_version": self._tag})
        fleet.sent(self._tag)

    def _warn_of_dtypes(self) -> None:
        """Warn about another dtype, also of the head: it is allowed, but one cause of a mismatch."""
        policy = self.context.policy
        ours, casts_head = str(policy.dtype).removeprefix("torch."), has_float32_head(policy)
        for url, about in self._fleet.look().items():
            if about["dtype"] != ours:
                what = f"{url} samples in {about['dtype']} for a policy in {ours} (grpox serve --dtype {ours})"
                logger.warning("vllm-server: %s", what)
            if casts_head and (theirs := about.get("head_dtype", about["dtype"])) != "float32":
                what = f"{url} has a head in {theirs}, but the run has model.cast_lm_head_to_fp32"
                logger.warning("vllm-server: %s (grpox serve RUN, or -- %s '%s')", what, *FLOAT32_HEAD)

    @contextmanager
    def _translate_config_errors(self) -> Iterator[None]:
        """Raise RunFailed for a ConfigError on ranks other than 0: rank 0 reports mistakes in the run file."""
        try:
            yield
        except ConfigError as error:
            if self.context.rank == 0:
                raise
            raise RunFailed(str(error)) from error

    def _new_sender(self) -> FileSender | NcclSender:
        transfers = {about["transfer"] for about in self._fleet.abouts.values()}
        if len(transfers) > 1:
            what = "some servers receive weights by nccl and some through files"
            raise ConfigError(what, "generator.urls", allowed="the same grpox serve --weights for all servers")
        if transfers == {"nccl"}:
            return NcclSender(self._fleet, self.context.policy, self._bucket_bytes)
        return FileSender(self._fleet, self._bucket_bytes)

    def _requests(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> list[PromptRequest]:
        positions = min((about["max_model_len"] for about in self._fleet.look().values()), default=None)
        seeded = [(prompt, seed_of(prompt, seed)) for prompt in prompts]
        stops, whose = self.context.stop_token_ids, "a vLLM server (grpox serve --max-model-len)"
        params = request_params(seeded, sampling, stops, self._vocabulary, positions, whose)
        return [PromptRequest(prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    def _ask(self, requests: Sequence[PromptRequest]) -> PendingRequests:
        """Send requests to the servers that have the current weights."""
        ranks = self.context.world_size
        members = [
            # Room for twice the number of completions that the server samples at a time, shared with the other
            # ranks.
            Member(self._fleet.clients[url], max(1, 2 * int(about["max_num_seqs"]) // ranks))
            for url, about in self._fleet.look().items()
            if about["weight_version"] == self._tag
        ]
        return PendingRequests(self._fleet, members, requests, self._tag, self.version)

    def _read(self, pending: PendingRequests) -> Iterator[Rollout]:
        with self._translate_config_errors():
            for request, done in pending.arriving():
                prompt, tokens, logprobs = request.prompt, tuple(done.token_ids), tuple(done.logprobs)
                of = prompt.group_id, done.index, prompt.token_ids, tokens
                yield Rollout(*of, done.finish_reason, pending.version, logprobs)
