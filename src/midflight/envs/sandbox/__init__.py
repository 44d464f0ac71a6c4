"""Execution of generated Python code in a process that reaches neither the network nor other files and processes.

    Sandbox (grading process) ── pipe ── worker: one process with the limits of the machine found out
                                            └── job: a fork of the worker, one per execution, confined before any of
                                                     the generated code runs, killed at its end

Only the standard library is used here, so that a worker starts in milliseconds and its memory has nothing to steal.
"""
