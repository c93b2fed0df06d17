"""Runs hostile Python. Needs nothing but the standard library, and nothing of Covey: see the README in this folder.

On this side: `harness` (does a program pass its tests?) over `sandbox` (confined processes), with `supervisor`,
`packages`, `programs`, `errors`. On the other: `zygote` forks the confined ones, `inside` is what they do, `confine`
and `seccomp` are what they cannot do. On both: `codec` and `frames`, values and messages.

This file imports nothing, since the process that forks the confined ones loads it too.
"""
