"""Building objects from recipes and scenarios. Only this package and `run` name concrete classes.

build.py         recipe -> trainer, preprocessing, actor settings; also the checks before a process starts
schedules.py, objectives.py, environments.py, engines.py, streams.py, weights.py, metrics.py
                 recipe -> one kind of object each
scenarios.py, simulation.py, planning.py    scenario -> workload, simulated run, plan
importing.py     names -> classes and functions, built-in ones and the user's own
"""
