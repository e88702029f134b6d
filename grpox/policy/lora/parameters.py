"""Adapters of parameters, such as stacked experts, that also work on the shards of ZeRO-3.

peft replaces the parameter by a parametrization in each forward pass, before ZeRO-3 has gathered it for its
module, and computes the sum twice. Here the forward pass of the module itself, for which ZeRO-3 has gathered W,
A and B, reads the sum instead of W.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.lora.layer import ParamWrapper

from grpox.policy.lora.layers import factors_of, parameters_of


class ParameterAdapter(ParamWrapper):  # type: ignore[misc]
    """The module of a parameter with an adapter; the adapters of several parameters of a module are nested."""

    is_read = False
    """True once the forward pass of the module has run with the adapter."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Run the module with ``W + scale * B A`` in place of its parameter W."""
        if self.disable_adapters:
            return self.base_layer(*args, **inputs)
        module, name = self.get_base_layer(), self.parameter_name
        own_forward = module.forward

        def forward(*args: Any, **inputs: Any) -> Any:
            self.is_read = True
            merged = factors_of(self, *parameters_of(self)).added_to(module._parameters[name])
            with _attribute(module, name, merged):
                return own_forward(*args, **inputs)

        with _attribute(module, "forward", forward):
            return self.base_layer(*args, **inputs)


@contextmanager
def _attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of the object itself within the block, before a parameter or method of this name."""
    attributes = vars(module)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)
