"""Predicted speed with and without speculation, from a model's shape and a machine's rates; and replays of traces.

`shapes` says what a model reads and computes, `hardware` and `here` what a machine does, `passes` what a pass takes on it, `predict`
what follows for drafts; `replay` says what a trace's rounds would have given under other drafts.
"""
