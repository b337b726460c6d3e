# Every habit by name. `make demo` and `make test` make what they need.
VENV := .venv
PY := $(VENV)/bin/python
PYTHON := $(shell for p in $$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python3.12 2>/dev/null | sort -rV) python3.12 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo "$$p" && break; done)
STAMP := $(VENV)/.installed-for-analysis
TEST_STAMP := $(VENV)/.installed-for-tests
DOCS_STAMP := $(VENV)/.installed-for-docs
NEWEST := .venv-newest
NEWEST_PACKAGES := $(NEWEST)/.packages
NEWEST_STAMP := $(NEWEST)/.installed
TEST_EXTRAS := test,megatron
# By uv, which fetches and unpacks packages at once, and those of both environments once; by pip where there is no uv.
# Modules are compiled as they are imported.
PIP := -m pip install --disable-pip-version-check -q --no-compile
install_in = $(1) -m uv pip install -q --python $(1) $(2) || $(1) $(PIP) $(2)
# Processes of tests import torch and Megatron anew: uncompiled, that takes twice the time or more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo install install-newest packages-newest test golden mutants test-newest test-ray compare-packers lint format bench references docs clean
help:            ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## create .venv with thdprof and what analysis needs
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.12 found: install one with pyenv (pyenv install 3.12)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	-$(PY) $(PIP) uv
$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call install_in,$(PY),-c constraints.txt -e .)
	@touch $@
$(TEST_STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call install_in,$(PY),-c constraints.txt -e '.[$(TEST_EXTRAS)]')
	$(call install_in,$(PY),-c constraints.txt --no-deps megatron-bridge)
	@touch $(STAMP) $(if $(findstring docs,$(TEST_EXTRAS)),$(DOCS_STAMP)) $@
$(DOCS_STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call install_in,$(PY),-c constraints.txt -e '.[docs]')
	@touch $(STAMP) $@

demo: $(STAMP)   ## write sample data, analyse it, leave demo/plan.yaml and its profile
	$(VENV)/bin/thdprof demo demo --force >/dev/null
	$(VENV)/bin/thdprof analyze demo/bridge --loader single --pad-to-max-length --data-parallel-size 8 --global-batch-size 64 \
		-o demo/plan.yaml --profile demo/plan.profile.parquet --force

install: $(TEST_STAMP)  ## add to .venv what tests need, and TEST_EXTRAS=test,megatron,docs the site, too
install-newest: $(NEWEST_STAMP)  ## make .venv-newest
packages-newest: $(NEWEST_PACKAGES)

test: $(TEST_STAMP)  ## run all tests, spread over cores (GPU tests are skipped without a GPU)
	$(PY) -m pytest -q -n logical --maxprocesses 16 --dist worksteal $(ARGS)

golden: $(TEST_STAMP)  ## compare what thdprof prints and writes for fixed cases with tests/golden
	$(PY) tools/golden.py check

mutants: $(TEST_STAMP)  ## run the tests of 200 small faults in thdprof, and print those that no test notices
	$(PY) tools/mutants.py cover
	$(PY) tools/mutants.py run $(ARGS)

# No constraints: the newest versions that pyproject.toml allows, with the tests that need no Megatron. Their packages do not
# touch this checkout, so that they can be installed beside those of .venv.
$(NEWEST_PACKAGES): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.12 found: install one with pyenv (pyenv install 3.12)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(NEWEST)
	-$(NEWEST)/bin/python $(PIP) uv
	$(NEWEST)/bin/python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
		print(*project['dependencies'], *project['optional-dependencies']['transformers'], sep='\n')" >$(NEWEST)/requirements.txt
	$(call install_in,$(NEWEST)/bin/python,-r $(NEWEST)/requirements.txt pytest pytest-xdist hypothesis)
	@touch $@
$(NEWEST_STAMP): $(NEWEST_PACKAGES)
	$(call install_in,$(NEWEST)/bin/python,--no-deps -e .)
	@touch $@

test-newest: $(NEWEST_STAMP)  ## run the tests of runtime and Trainers with the newest versions that are allowed
	$(NEWEST)/bin/python -m pip list --disable-pip-version-check | grep -E '^(accelerate|datasets|peft|torch|transformers|trl) '
	$(NEWEST)/bin/python -m pytest -q -n logical --maxprocesses 16 --dist worksteal --ignore tests/runtime/megatron \
		tests/runtime tests/transformers tests/examples/test_trl_example.py $(ARGS)

test-ray: $(TEST_STAMP)  ## run the tests on a Ray cluster, on moto's S3 and beside Grain, whose packages this adds to .venv
	$(call install_in,$(PY),-c constraints.txt -e '.[ray]' 'moto[server]>=5' 'grain>=0.2.18')
	$(PY) -m pytest -q -n 0 tests/analyze/test_ray.py tests/analyze/test_moto.py tests/analyze/test_grain_packers.py $(ARGS)

PACKERS := build/packers
RELEASED := axolotl==0.19.0 llamafactory==0.9.5 ms-swift==4.6.0 binpacking==2.0.1 verl==0.9.1
compare-packers: $(TEST_STAMP)  ## pack random documents by released Axolotl, LLaMA-Factory, ms-swift, verl and NeMo-RL, and compare
	$(call install_in,$(PY),--no-deps --upgrade --target $(PACKERS) $(RELEASED))
	-test -d $(PACKERS)/nemo-rl || git clone -q --depth 1 https://github.com/NVIDIA-NeMo/RL $(PACKERS)/nemo-rl
	$(PY) tools/compare_packers.py $(PACKERS) $(ARGS)

lint: $(TEST_STAMP)  ## format check, lint, types, boundaries
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(TEST_STAMP)  ## rewrite files in the project's format
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: $(TEST_STAMP)  ## time analysis beside its peers
	$(PY) benchmarks/analyze.py

references: $(STAMP)  ## write the generated parts of docs/ anew: commands, plan, refused settings, Python, evidence
	$(PY) docs/tools/references.py
	$(PY) tools/evidence.py

docs: $(DOCS_STAMP)  ## build the site into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:           ## remove what the targets above made
	rm -rf $(VENV) $(NEWEST) demo build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
