"""The only place that names concrete classes: recipes become processes.

build.py            recipe -> schedule, engine, trainer, loss; environments.py: recipe -> environment
run_directory.py    where everything of a run is, and its lock
workers.py          the process bodies: rollout, trainer, and preprocessing where it has its own
local.py            the supervisor on one machine
serve.py            a model over HTTP
progress.py         what a person sees while it runs; report.py afterwards
"""
