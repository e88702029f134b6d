"""Masks secrets in everything that is shown, saved or sent, by the names of their keys and by their form.

`redacted` is for configs and other data with keys, `redact` for text: messages, addresses, tracebacks. Both
replace a secret by ``***`` and keep the part that shows its kind: ``hf_***``, ``me:***@host``.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

MASK = "***"
SHORTEST_KNOWN = 8
"""Shortest secret that is masked everywhere in text; a shorter one may be an ordinary word."""

# Names of keys, in lower case, with _ between their words.
_ENDING = r"(?:_?\d+|_(?:value|text|string|plain|raw|base64|b64|hash|base|default|old|new|prod|dev))?$"
_NAMES = re.compile(
    r"(?:^|_)(?:"
    r"[a-z]*passw(?:or)?ds?|pass_?(?:phrase|code)s?|(?:db|user|smtp|admin|root|login|my|keystore)_?pass|pwd"
    r"|(?:client|app|shared|consumer)?secrets?|credentials?|creds?"
    r"|(?:basic|http|proxy)?_?auths?|authori[sz]ation|bearer|jwt|(?:session)?cookies?"
    r"|dsn|conn(?:ection)?_?str(?:ing)?s?|shared_access_signature|webhook(?:_url)?s?|otp|pat|mnemonic"
    r"|sas_url|seed_phrase"
    r"|(?:api|app|access|auth|priv|private|secret|client|account|signing|encryption|master|shared|storage|service"
    r"|subscription|license|deploy|ssh|gpg|aes|hmac|hub|hf|openai|anthropic|wandb|aws|azure|google"
    r"|gcp|gemini|mistral|groq|deepseek|cohere|fireworks|openrouter|together|vllm|xai|fernet|judge)_?keys?(?:_id)?"
    r"|(?:api|access|auth|bearer|bot|hf|hub|identity|refresh|secret|session|private|personal|github|gitlab|slack)_?tokens?"
    rf")(?:_(?:headers?|list|pem|json))?{_ENDING}"
)
_ANY_KEY = re.compile(rf"(?:^|_)keys?{_ENDING}")
_TOKEN = re.compile(rf"(?:^|_)token{_ENDING}")
_OF_MODELS = re.compile(
    r"(?:^|_)(?:pad|eos|bos|unk|sep|cls|mask|stop|image|video|audio|special|start|end|begin|think|tool|boi|eoi"
    r"|newline|nl|blank|prefix|suffix|middle|first|last|next|new|per|max|min|num|n|total|count|every|each|text"
    r"|separator|delimiter|placeholder|answer|system|assistant|role|reward|prompt|completion|input|output|draft"
    r"|eot|eom|sot|turn|padding|thinking|thought|reasoning|fim|lang|language|src|tgt|domain)"
    rf"_token{_ENDING}"
)
_IN_QUERIES = {"key", "sig", "signature", "pass", "x_amz_signature", "x_amz_credential"}
"""Names of secrets in the query of an address only."""
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_PLACE = re.compile(r"\[\d+\]|\.\d+(?=\.|$)")

# Forms of secrets.
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----).*?(?=-----END [A-Z ]*PRIVATE KEY|\Z)", re.DOTALL
)
_PASSWORD = re.compile(r"(?<=://)([^\s/:@\"\[]*):(?!\d{1,5}(?:[/?#,;\s\"']|$))((?:(?!://)[^\s\"])*)@")
_USER = re.compile(r"((?:git\+)?https?://)(?!git@)[^\s/:@\"?#]+@")
_QUERY = re.compile(r"([?&#;])([\w.%-]+)=([^\s&#;\"')\]}>]+)")
_SCHEME = re.compile(r"\b(bearer|basic)(\s+)([\w.~+/-]+=*)", re.IGNORECASE)
_PROSE = re.compile(r"(?:tokens?|auth\w*|credentials?|schemes?|of)\b", re.IGNORECASE)
"""Words that follow Bearer in a sentence."""
_VENDORS = (
    r"glpat-|xox[abeoprs]-|xapp-\d-|sk-(?:ant|proj|or|svcacct|admin)-|[srp]k_(?:live|test)_|nvapi-|pypi-AgE|ya29\."
    r"|dckr_pat_|whsec_|ATATT3|sq0(?:atp|csp)-|sl\.[A-Z]"
)
_HUBS = r"hf_|gsk_|npm_|r8_|fw_|xai-|AGE-SECRET-KEY-|tgp_v1_|wandb_v1_|hvs\.|lin_api_|shpat_"
_WEBHOOKS = r"hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/|api\.telegram\.org/bot"
_KNOWN_FORM = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    r"(?P<github>gh[opusr]_|github_pat_)\w{16,}"
    rf"|(?P<vendor>{_VENDORS})[\w-]{{8,}}"
    rf"|(?P<hub>{_HUBS})(?=[a-z]*[A-Z0-9]|[a-z]{{30}})[A-Za-z0-9]{{20,}}"
    r"|(?P<openai>sk-)(?=[\w-]{0,99}[A-Za-z0-9]{12})(?=[A-Za-z_-]{0,99}\d)[\w-]{16,}"
    r"|(?P<aws>AKIA|ASIA)[A-Z0-9]{12,}"
    r"|(?P<google>AIza)[\w-]{20,}"
    r"|(?P<databricks>dapi)[0-9a-f]{32}"
    r"|(?P<sendgrid>SG\.)[\w-]{16,}\.[\w-]{16,}"
    rf"|(?P<webhook>{_WEBHOOKS})[\w/:-]{{8,}}"
    r"|(?P<jwt>eyJ)[\w-]{5,999}\.[\w-]{5,}(?:\.[\w-]*)?"
    r")"
)
_COOKIE = re.compile(r"(\bcookie:\s*)[^\r\n\"']{0,200}\w=[^\r\n\"']+", re.IGNORECASE)
_HEADER = re.compile(r"(\bauthorization:\s*)(?:digest|aws4-[\w-]+)\s[^\r\n]+", re.IGNORECASE)
"""The header of schemes that have parameters."""
_NETRC = re.compile(r"(\b(?:machine\s+\S+|default)\s+login\s+\S+\s+password\s+)\S+")
_KEY = re.compile(
    r"(?<![\w.\-\[\]])(?P<flag>--)?(?P<quote>\\?[\"']|)(?P<key>[A-Za-z_][\w.\-\[\]]*)(?P=quote)"
    r"(?P<between>\s*[=:]\s*|(?(flag)[ ]|(?!)))"
)
_VALUE = re.compile(
    r"\\\"(.*?)(?:\\\"|$)|([\[({][^\])}\"']{0,999}[\"'][^\])}]{0,9999}[\])}])"
    # Of Python, too: b'...' and SecretStr('...').
    r"|(?:[bru]{1,2}|(?:[a-z_][\w.]{0,60}[(\[]){1,3})?(?:\"((?:[^\"\\]|\\.)*)|'((?:[^'\\]|\\.)*))"
    r"|((?:(?:bearer|basic|token|digest)\s+)?[^\s\"',;&)}\]]+)",
    re.IGNORECASE,
)
UNQUOTED = 5
"""The group of a value without quotes."""
_SECRET_OF_ANY_FORM = ".".join(["1" * 30 + "aa"] * 2)
"""Text that is a secret behind every prefix and in every place in which one is masked by form."""
_PLACEHOLDER = re.compile(r"[(\[{<\\^]|\$\{|\$[A-Z_]+$")
"""Beginnings of placeholders, which are not masked: ``{key}``, ``<your token>``, ``$TOKEN``, a pattern."""
_DRAWN = re.compile(r"(?=\D*\d)(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])[\w+/=-]{20,}", re.ASCII)
"""Form of a random key; digests and names do not have it."""
_NOTHING = {"null", "none", "true", "false"}

_known: set[str] = set()
"""Secrets of this process's run and environment."""


def redact(text: str) -> str:
    """Mask secrets in `text`: ``http://me:secret@host``, ``?token=secret``, ``api_key='secret'``, ``hf_...``.

    Secrets passed to `remember_secrets` are masked everywhere.
    """
    for secret in sorted(_known, key=len, reverse=True):
        if secret in text:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", MASK, text)
    return _without_forms(text)


def redacted(value: Any, key: str = "") -> Any:
    """Mask secrets in `value` (mappings, lists and scalars), by the keys of mappings and by form.

    A number under a secret's key is masked too; true, false, null and empty text are never masked.
    """
    return _mapped(value, _masked, key)


def remember_secrets(config: Any) -> None:
    """Make `redact` mask the secrets of `config` and the environment everywhere."""
    environment = {name: text for name, text in os.environ.items() if name not in ("PWD", "OLDPWD")}
    for each in (config, environment):
        _mapped(each, _remember)


def masked_keys(config: Any) -> list[str]:
    """List the dotted keys, such as ``rewards.0.api_key``, whose value is a secret masked by `redacted`."""
    keys: list[str] = []

    def look(value: Any, key: str, is_secret: bool) -> None:
        is_drawn = value == MASK and (_ANY_KEY.search(_words(key)) or _is_in_tokens(key))
        if isinstance(value, str) and MASK in value:
            again = re.sub(r"\*{3}(?![\w*])", _SECRET_OF_ANY_FORM, value)
            if is_secret or is_drawn or _without_forms(again) != again:
                keys.append(key)

    _mapped(config, look)
    return keys


@lru_cache(maxsize=4096)
def names_a_secret(key: str) -> bool:
    """Return True for a secret's name: ``api_key``, ``hfToken``, ``db.password``; not for ``eos_token``."""
    return _is_named_surely(key) or (bool(_TOKEN.search(_words(key))) and not _OF_MODELS.search(_words(key)))


def _is_named_surely(key: str) -> bool:
    """Return True if only a secret has this name: a model's ``boundary_token`` is a token too."""
    return bool(_NAMES.search(_words(key))) or _words(key) == "token"


def _words(key: str) -> str:
    """Return the words of a dotted key's last part: ``rewards[0].apiKeys[1]`` -> ``api_keys``."""
    last = _PLACE.sub("", key).rpartition(".")[2]
    return re.sub(r"[^a-z0-9]+", "_", _HUMP.sub("_", last).lower()).strip("_")


def _mapped(value: Any, visit: Callable[[Any, str, bool], Any], key: str = "", is_secret: bool = False) -> Any:
    """Map each scalar of `value` by `visit`: its value, its dotted key, and True under a secret's key."""
    is_secret = is_secret or names_a_secret(key)
    if isinstance(value, Mapping):
        # As in [{name: API_KEY, value: ...}].
        is_pair = names_a_secret(str(value.get("name") or value.get("key") or ""))
        return {
            _without_forms(name) if isinstance(name, str) else name: _mapped(
                item, visit, f"{key}.{name}".lstrip("."), is_secret or (is_pair and name == "value")
            )
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _mapped(item, visit, f"{key}.{place}".lstrip("."), is_secret or _follows_name(value, place, key))
            for place, item in enumerate(value)
        ]
    return visit(value, key, is_secret)


def _follows_name(items: Sequence[Any], place: int, key: str) -> bool:
    """Return True if the item before is a secret's name, as in ``--token VALUE`` or a pair in a list."""
    before = items[place - 1] if place else None
    is_pair = len(items) == 2 and key.rpartition(".")[2].isdecimal()
    return isinstance(before, str) and (is_pair or before[:2] == "--") and names_a_secret(before.lstrip("-"))


def _masked(value: Any, key: str, is_secret: bool) -> Any:
    if is_secret and not isinstance(value, bool) and value not in (None, ""):
        is_text = isinstance(value, str)
        # A language model's token: its number, or <|its text|>.
        is_of_model = bool(_TOKEN.search(_words(key))) and (not is_text or value[0] in "<[")
        if not is_of_model or _is_named_surely(key):
            return MASK
    if isinstance(value, str) and _DRAWN.fullmatch(value) and _ANY_KEY.search(_words(key)):
        return MASK
    if isinstance(value, str) and value[:1] not in ("", "<", "[") and _is_in_tokens(key):
        return MASK
    return _without_forms(value) if isinstance(value, str) else value


def _is_in_tokens(key: str) -> bool:
    """Return True in a mapping or list of secret tokens, as in ``tokens: {judge: ...}``."""
    above = (_words(key[: dot.start()]) for dot in re.finditer(r"\.", key))
    return any(name == "tokens" or names_a_secret(name.removesuffix("s")) for name in above)


def _remember(value: Any, key: str, is_secret: bool) -> None:
    text = value.strip() if isinstance(value, str) else ""
    if len(text) >= SHORTEST_KNOWN and _masked(value, key, is_secret) == MASK != value:
        # As it is, and as messages, JSON and addresses write it.
        _known.update((text, repr(text)[1:-1], json.dumps(text)[1:-1], quote(text, ""), quote_plus(text)))


def _without_forms(text: str) -> str:
    text = _PRIVATE_KEY.sub(rf"\1{MASK}", text)
    text = _PASSWORD.sub(_without_password, text)
    text = _USER.sub(rf"\1{MASK}@", text)
    text = _QUERY.sub(lambda each: f"{each[1]}{each[2]}={MASK}" if _names_in_query(each[2]) else each[0], text)
    for form in (_COOKIE, _HEADER, _NETRC):
        text = form.sub(rf"\1{MASK}", text)
    text = _SCHEME.sub(_without_credentials, text)
    text = _KNOWN_FORM.sub(lambda each: f"{each[str(each.lastgroup)]}{MASK}", text)
    parts, done = [], 0
    for begin, end in _values_of_secrets(text):
        parts += [text[done:begin], MASK]
        done = end
    return "".join([*parts, text[done:]])


def _without_password(match: re.Match[str]) -> str:
    user, password = match.groups()
    # Some services take a token as the user name, with no password or with this one.
    return f"{MASK}:{password}@" if user and password in ("", "x-oauth-basic") else f"{user}:{MASK}@"


def _names_in_query(name: str) -> bool:
    return names_a_secret(name) or _words(name) in _IN_QUERIES


def _without_credentials(match: re.Match[str]) -> str:
    """Mask ``Bearer ...`` and ``Basic ...`` of a header, but not the same words in a sentence."""
    scheme, space, given = match.groups()
    if scheme.lower() == "basic":
        try:
            is_secret = b":" in base64.b64decode(given, validate=True)
        except binascii.Error:
            is_secret = len(given) >= SHORTEST_KNOWN and _looks_drawn(given)
    else:
        is_secret = not _PROSE.match(given) and (scheme == "Bearer" or _looks_drawn(given))
    return f"{scheme}{space}{MASK}" if is_secret else match[0]


def _values_of_secrets(text: str) -> Iterator[tuple[int, int]]:
    """Find the values behind names of secrets: ``api_key=...``, ``'token': '...'``, ``--pwd ...``."""
    done = 0
    for name in _KEY.finditer(text):
        is_secret = name.start() >= done and names_a_secret(name["key"])
        value = _VALUE.match(text, name.end()) if is_secret else None
        if value is None or value.lastindex is None:
            continue
        begin, end = value.span(value.lastindex)
        is_quoted = bool(name["quote"]) or value.lastindex < UNQUOTED
        given = text[begin:end] if is_quoted else text[begin:end].rstrip(".:")
        is_masked = given.startswith(MASK)
        is_empty = given.lower() in _NOTHING or not (is_masked or re.search(r"\w", given))
        if is_empty or (not is_quoted and _PLACEHOLDER.match(given)):
            continue
        is_header = _words(name["key"]).startswith(("x_", "authori", "proxy_authori"))
        is_given = is_quoted or is_header or name["flag"] or name["between"] in "=:"
        if is_given or is_masked or _looks_drawn(given):
            done = begin + len(MASK if is_masked else given)
            yield begin, done


def _looks_drawn(text: str) -> bool:
    """Return True if `text` has both letters and digits, as a random key has and a word has not."""
    return len(text) >= 6 and bool(re.search(r"\d", text)) and bool(re.search(r"[A-Za-z]", text))
