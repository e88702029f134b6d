"""Parameters of the generator vllm-server."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from grpox.config import SamplingConfig
from grpox.contracts import InputPath
from grpox.errors import Problem
from grpox_generators import vllm_sampling

LONGEST_WAIT = 1500.0
"""Seconds: a rank that waits for another gives up after 30 minutes."""


class VllmServerConfig(BaseModel):
    """vLLM in servers of its own, which `grpox serve` starts."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    urls: list[str] = Field(["http://127.0.0.1:8000"], min_length=1)
    """The servers. A prompt goes to the one with the least to do."""
    token_file: InputPath | None = None
    """File of the servers' token; default: GRPOX_SERVER_TOKEN, else the one that `grpox serve` makes."""
    start_timeout: float = Field(240.0, ge=0, le=LONGEST_WAIT)
    """Seconds to wait for a server, at the start and when all are lost; 240 as in TRL, at most 1500."""
    connect_timeout: float = Field(10.0, gt=0)
    """Seconds to wait for a connection."""
    read_timeout: float = Field(600.0, gt=0, le=LONGEST_WAIT)
    """Seconds without a word before a server is lost: more than twice the longest completion, at most 1500."""
    retries: int = Field(3, ge=0)
    """Times that a failed request is sent again to the same server, after 0.5, 1, 2, ... seconds."""
    bucket_mib: int = Field(64, ge=1)
    """Weights sent at a time, two buckets under way at most; a larger parameter is one by itself."""

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            try:
                parts = urlsplit(url)
                well_formed = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            except ValueError:
                well_formed = False
            if not well_formed or parts.query or parts.fragment or parts.username:
                raise ValueError(f"'{url}' is not of the form http://HOST:PORT")
        return [url.rstrip("/") for url in urls]

    @model_validator(mode="after")
    def _different(self) -> Self:
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls names one server twice")
        return self

    def check_sampling(self, sampling: SamplingConfig) -> list[Problem]:
        """What of `sampling` vLLM cannot honour."""
        return vllm_sampling.refused(sampling)
