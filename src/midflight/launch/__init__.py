"""Recipes and scenarios become objects; besides `run`, the only package that names concrete classes.

build.py         recipe -> engine, trainer, actor settings; and the checks before a process starts
schedules.py, objectives.py, environments.py, streams.py, weights.py    recipe -> one kind of object each
scenarios.py, simulation.py, planning.py    scenario -> workload, simulated run, plan
importing.py     the user's own classes and functions, by import path
"""
