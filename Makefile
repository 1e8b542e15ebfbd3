# Every target sets up what it needs in a virtual environment of its own.
#   make demo    install, train a small GPT with AdamW and with AdamW8bit, print the table
#   make test    install with the test tools, run all tests
PYTHON ?= python3
VENV   ?= .venv
# Another torch: make demo TORCH='torch==2.10.*'. Any release from 2.10 on will do.
TORCH  ?= torch==2.13.0
ARGS   ?=

BIN     = $(VENV)/bin
SOURCES = setup.py pyproject.toml $(wildcard csrc/*.h csrc/*/*)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test asan bench lint format clean gpu-static gpu-check

demo: $(VENV)/.demo
	$(BIN)/python examples/gpt.py $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 $(ARGS)

# The kernel tests under the address and undefined-behaviour sanitizers.
asan: $(VENV)/.test
	$(BIN)/python -m tests.sanitized $(ARGS)

bench: $(VENV)/.test
	$(BIN)/python -m bench.cpu_speed
	$(BIN)/python -m bench.state_error
	$(BIN)/python -m pytest bench/test_kernels.py

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

$(VENV)/.dev: $(VENV)/.test
	$(BIN)/pip install --quiet --no-build-isolation --editable '.[dev]'
	touch $@
