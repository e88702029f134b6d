"""Whether a component that was written for one version of the plugin API works with this one."""

from __future__ import annotations

from grpox.plugins import hookspecs


def api_problem(api: int) -> str:
    """Why a component that was written for this version cannot be used, and what to do; empty if it can."""
    oldest, newest = hookspecs.SUPPORTED_API[0], hookspecs.SUPPORTED_API[-1]
    if api in hookspecs.SUPPORTED_API:
        return ""
    has = f"has {newest}" + (f" and takes {oldest} and later" if oldest < newest else "")
    remedy = "upgrade grpox" if api > newest else "upgrade the plugin"
    return f"written for plugin API {api}, this grpox {has}: {remedy}"


def api_note(api: int) -> str:
    """What the author of a component that can be used should change; empty for one of the newest version."""
    newest = hookspecs.SUPPORTED_API[-1]
    if api == newest or api not in hookspecs.SUPPORTED_API:
        return ""
    return f"written for plugin API {api}, which a later grpox will drop: its author should move to {newest}"
