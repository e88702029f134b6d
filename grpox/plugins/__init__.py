"""Plugins: discovery, components, their checked parameters, and the scaffold for new ones.

`hookspecs` has every hook and `ComponentSpec`. `discovery` reads the entry points; `loader` imports one plugin
and calls its discovery hooks. `registry` finds a component by kind and name, and checks that the capabilities
it needs are provided. `component` binds a component to its checked parameters. `scaffold` writes new plugins.
The package imports neither pydantic nor torch before a component is selected.
"""
