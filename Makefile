# Every target sets up what it needs in a virtual environment of its own.
#   make demo    install, train a small GPT with AdamW and with AdamW8bit, print the table
#   make test    install with the test tools, run all tests
PYTHON     ?= python3
VENV       ?= .venv
BENCH_VENV ?= .venv-bench
# Another torch: make demo TORCH='torch==2.10.*'. Any release from 2.10 on will do.
TORCH      ?= torch==2.13.0
ARGS       ?=

BIN     = $(VENV)/bin
SOURCES = setup.py pyproject.toml $(wildcard csrc/*.h csrc/*/*)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test fuzz constraints asan bench lint format clean gpu-static gpu-check

demo: $(VENV)/.demo
	$(BIN)/python examples/gpt.py $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 $(ARGS)

# Damaged files and state dicts, for so many seconds:  make fuzz ARGS=600
fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz $(ARGS)

# The kernel tests under the address and undefined-behaviour sanitizers.
asan: $(VENV)/.test
	$(BIN)/python -m tests.sanitized $(ARGS)

# All measurements, beside other libraries that stay in an environment of their own:  make bench ARGS="--budget 60"
bench: $(BENCH_VENV)/.bench
	$(BENCH_VENV)/bin/python -m bench.run $(ARGS)

gpu-static: $(VENV)/.test
	$(BIN)/python -m bench.gpu_static $(ARGS)

gpu-check: $(VENV)/.test
	$(BIN)/python -m bench.gpu_check $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

clean:
	rm -rf build dist *.egg-info py/*.egg-info py/fused8/*.so demo_out

# The versions that .ci/run installs, as pip chooses them today. Nothing is installed.
constraints: $(VENV)/.torch
	$(BIN)/pip install --dry-run --ignore-installed --quiet --no-build-isolation --report $(VENV)/report.json \
	  '$(TORCH)' 'setuptools>=77' wheel numpy '.[test,dev]'
	$(BIN)/python .ci/constraints.py < $(VENV)/report.json > .ci/constraints.txt

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet '$(TORCH)' 'setuptools>=77' wheel numpy
	touch $@

$(VENV)/.demo: $(VENV)/.torch $(SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation --editable '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.torch $(SOURCES)
	FUSED8_REQUIRE_BUILD=1 $(BIN)/pip install --quiet --no-build-isolation --editable '.[test]'
	touch $@

# A library that cannot be installed is left out: the results say so. None may replace torch.
$(BENCH_VENV)/.bench: $(SOURCES) $(wildcard py/fused8/*.py triton_kernels/*.py) bench/requirements.txt
	test -d $(BENCH_VENV) || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/pip install --quiet '$(TORCH)' 'setuptools>=77' wheel numpy
	FUSED8_REQUIRE_BUILD=1 $(BENCH_VENV)/bin/pip install --quiet --no-build-isolation .
	$(BENCH_VENV)/bin/pip freeze | grep '^torch==' > $(BENCH_VENV)/constraints.txt
	grep -v '^#' bench/requirements.txt | while read -r package; do \
	  $(BENCH_VENV)/bin/pip install --quiet --constraint $(BENCH_VENV)/constraints.txt "$$package" \
	    || echo "could not be installed: $$package"; \
	done
	touch $@

$(VENV)/.dev: $(VENV)/.test
	$(BIN)/pip install --quiet --no-build-isolation --editable '.[dev]'
	touch $@
