# make setup          creates .venv with the `choreo` command, in the versions of constraints.txt
# make demo           trains PPO on CartPole in seconds, and writes the results to runs/demo
# make test           every check of CI: ruff, pyright, imports, tests, and the graph tests on the newest JAX
# make test-long      the promises of `make test` in more combinations: layouts, killed workers, environments, benchmarks
# make test-learning  trains to the returns that the docs state, over several seeds
# make bench          runs every script in benchmarks/, one question each; writes benchmarks/results/*.json and README's table
# make constraints    writes the newest versions that pyproject.toml allows to constraints.txt; commit this file

.PHONY: setup demo test lint test-main test-next test-long test-learning bench constraints clean
.DELETE_ON_ERROR:

PYTHON ?= $(shell bash .ci/find-python 3.11 3.12 3.13)
BIN := .venv/bin
NEXT := 3.13
WORKERS ?= 2

setup: .venv/.stamp

.venv/.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Found no Python 3.11, 3.12 or 3.13. Set PYTHON=/path/to/python (3.11 or newer)."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	rm -rf runs/demo
	$(BIN)/choreo train ppo jax:CartPole-v1 --layout fused --num-envs 8 --steps 300000 --seed 0 --out runs/demo

# `lint` uses only one core most of the time, so `test-next` runs at the same time.
test:
	$(MAKE) --no-print-directory --jobs 2 lint test-next
	$(MAKE) --no-print-directory test-main

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

# The first command runs the tests, with programs compiled without optimisations (tests/conftest.py). The second command runs some
# of the laws again, with programs compiled with optimisations, as users' programs are.
test-main: setup
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal --durations 25
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal -m optimised tests/laws

# Tests the undocumented parts of JAX that Choreo uses, and the graph code that depends on them, with JAX's newest release.
test-next:
	@python=$$(bash .ci/find-python $(NEXT)); \
	if [ -z "$$python" ]; then \
	  echo "skipped: the graph tests on the newest JAX, because there is no Python $(NEXT) here"; \
	elif ! $(MAKE) --no-print-directory .venv-next/.stamp NEXT_PYTHON=$$python; then \
	  echo "skipped: the graph tests on the newest JAX, because pip could not install the packages for Python $(NEXT)"; \
	else \
	  .venv-next/bin/python -c 'import jax, sys; print("graph tests: JAX", jax.__version__, "on Python", sys.version.split()[0])' \
	  && .venv-next/bin/pytest --numprocesses $(WORKERS) --dist worksteal tests/test_compat.py tests/graph tests/partition; \
	fi

.venv-next/.stamp: pyproject.toml
	$(NEXT_PYTHON) -m venv .venv-next
	.venv-next/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --editable '.[test]'
	@touch $@

test-long: setup
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal --durations 25 -m long

test-learning: setup
	$(BIN)/pytest -m learning tests/learning

bench: setup
	@for script in $(filter-out benchmarks/table.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python $$script || exit 1; done
	$(BIN)/python benchmarks/table.py

constraints:
	@test -n "$(PYTHON)" || { echo "Found no Python 3.11, 3.12 or 3.13. Set PYTHON=/path/to/python (3.11 or newer)."; exit 1; }
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	{ echo '# Every version `make` installs, on Linux with Python 3.11. Made by `make constraints`.'; \
	  build/constraints/bin/python -m pip freeze --exclude-editable; } > constraints.txt
	rm -rf build/constraints

clean:
	rm -rf .venv .venv-next build runs/demo .pytest_cache .ruff_cache .import_linter_cache
