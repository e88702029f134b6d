"""Keeps secrets out of what is shown or sent elsewhere: passwords in addresses, values of secret keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_IN_ADDRESS = re.compile(r"(?<=://)([^\s/:@]*):[^\s/]*@")
_SECRET = (
    r"(?:access_?|auth_?|api_?|hf_?|private_?)?(?:token|key)|password|passwd|passphrase|secret|credentials?"
)
_IN_QUERY = re.compile(rf"([?&](?:\w+_)?(?:{_SECRET})=)[^\s&#'\")]+", re.IGNORECASE)
_NAMES_ONE = re.compile(
    r"(?:^|[_.-])(?:token|password|passwd|passphrase|secret|credentials?|(?:api|access|auth|private|secret)[_-]?key)$",
    re.IGNORECASE,
)
_OF_TOKENIZERS = re.compile(r"(?:^|_)(?:pad|eos|bos|unk|sep|cls|mask|stop|image|additional_special)_token$")


def redact(text: str) -> str:
    """`text` with ``***`` in place of passwords in addresses (``http://me:secret@host``, ``?token=secret``)."""
    return _IN_QUERY.sub(rf"\1{MASK}", _IN_ADDRESS.sub(rf"\1:{MASK}@", text))


def names_a_secret(key: str) -> bool:
    """Whether a key names a secret: ``api_key``, ``hf_token``, ``db.password``; not ``eos_token``."""
    return bool(_NAMES_ONE.search(key)) and not _OF_TOKENIZERS.search(key)


def redacted(value: Any, key: str = "") -> Any:
    """`value`, of mappings, lists and scalars, without secrets; a mapping's values are judged by their keys."""
    if isinstance(value, Mapping):
        return {name: redacted(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, key) for item in value]
    if isinstance(value, str):
        return MASK if value and names_a_secret(key) else redact(value)
    return value
