"""Episodes of several turns: the model writes, an environment answers, the model goes on.

`waves` samples all open episodes turn by turn above any generator; `bridge` writes the tokens between two
turns; `pool` has the environments, each in a process of its own.
"""
