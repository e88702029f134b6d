"""What each launcher tells the processes that it starts, by environment variables."""

from __future__ import annotations

from grpox.runtime.launchers.found import place_of, standard
from grpox.runtime.launchers.variables import Place

__all__ = ["Place", "place_of", "standard"]
