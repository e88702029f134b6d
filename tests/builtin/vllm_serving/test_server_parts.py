"""Parts of vllm-server that need no server: parameters, and what makes two models alike."""

import pytest
from pydantic import ValidationError
from transformers import LlamaConfig

from grpox_generators.configs import VllmServerConfig
from grpox_vllm_serving.protocol import differences, signature


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://host:1", "http://", "http://host:99999", "http://me:pw@host:1", "http://h:1?x=1"],
)
def test_addresses_are_checked(url):
    with pytest.raises(ValidationError, match="does not have the form http://HOST:PORT"):
        VllmServerConfig(urls=[url])


def test_one_address_is_one_server():
    assert VllmServerConfig(urls=["http://a:1/", "https://b:2"]).urls == ["http://a:1", "https://b:2"]
    with pytest.raises(ValidationError, match="names one server twice"):
        VllmServerConfig(urls=["http://a:1", "http://a:1/"])
    with pytest.raises(ValidationError):
        VllmServerConfig(urls=[])


def test_models_differ_in_their_shape_and_not_in_their_weights():
    ours = signature(LlamaConfig(hidden_size=64, vocab_size=17))
    assert differences(ours, signature(LlamaConfig(hidden_size=64, vocab_size=17, rope_theta=1.0))) == []
    other = signature(LlamaConfig(hidden_size=32, vocab_size=18, head_dim=2))
    assert differences(ours, other) == [
        "vocab_size is 18 there and 17 here",
        "hidden_size is 32 there and 64 here",
    ]
