"""Environments and tools: what a model acts on in episodes of several turns, as plain Python without torch."""

from grpox.contracts import ToolCall, ToolResult
from grpox.environments.environment import Appended, Environment, tool

__all__ = ["Appended", "Environment", "ToolCall", "ToolResult", "tool"]
