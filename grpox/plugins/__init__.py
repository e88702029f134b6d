"""Plugins: found, asked what they offer, bound to their parameters and called.

`hookspecs` has every hook and `ComponentSpec`. `discovery` goes through the entry points; `loader` imports
one plugin and asks it. `registry` finds a component by kind and name and compares what components need with
what others provide. `component` binds one to its checked parameters and calls it in a run. `scaffold` writes
new plugins. Imports neither pydantic nor torch before a component is selected.
"""
