# Two commands for everybody: `make demo` shows it, `make test` tests it. Both build .venv when it is missing.
#   PYTHON          the interpreter .venv is made from (3.11 to 3.13)
#   PIP_TORCH_ARGS  passed to pip for torch alone, e.g. an index with PyTorch's CPU build
# `make .venv/installed-gguf` adds libllama, which tests of GGUF files need.

PYTHON ?= python3
PIP_TORCH_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# With the build backend pinned and installed first, nothing is fetched that constraints.txt does not name.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt outrider-models/pyproject.toml

.DELETE_ON_ERROR:
.PHONY: demo test check prove clean

demo: $(VENV)/installed
	$(BIN)/outrider demo $(DEMO_ARGS)

test: $(VENV)/installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test $(TEST_ARGS)

check: $(VENV)/installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

prove: $(VENV)/installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/prove

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes alone: an index of PyTorch's has neither the other packages nor the pinned versions of what torch needs.
$(VENV)/installed: $(INPUTS) | $(BIN)/python
	$(PIP_INSTALL) hatchling editables
	$(PIP_INSTALL) $(PIP_TORCH_ARGS) --no-deps torch
	$(PIP_INSTALL) --no-build-isolation -e . -e ./outrider-models
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	touch $@

# For the tests of GGUF files, which are skipped without: libllama is built from source, in minutes.
# It takes a C++ compiler and CMake.
$(VENV)/installed-gguf: $(VENV)/installed-dev
	$(PIP_INSTALL) scikit-build-core
	CMAKE_ARGS="-DLLAVA_BUILD=OFF $(CMAKE_ARGS)" $(PIP_INSTALL) --no-build-isolation -e '.[gguf]'
	touch $@
