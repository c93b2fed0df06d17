"""Runs hostile Python. The modules here need nothing but the standard library: they also run without Covey around them.

codec      plain values <-> JSON; whatever else is no value
confine    what the kernel can forbid a process, and doing it
seccomp    which system calls a confined process may make
inside     what a confined process does: answer calls, run a program, run tests
frames     messages between a confined process and whoever asked for it
zygote     a small process that forks confined ones and ends them
"""
