# The targets for work on Trainbox itself. The Makefile includes this file.

##@ Work on Trainbox

suite = $(VENV)/bin/python -P -m tests.support.suite
fast = $(suite) -m "not slow" --ignore=tests/image $(PYTEST_ARGS)

test: $(VENV)/.dev ## Lint, and every test except the slow ones and the tests of the image (PYTEST_ARGS=)
	$(fast) --lint

test-all: $(VENV)/.dev ## test, test-faults and test-slow together, each test once (PYTEST_ARGS=)
	$(suite) --lint --ignore=tests/image $(PYTEST_ARGS)

test-ci: $(VENV)/.dev ## test-all, but of several slow tests of one kind only one; .ci/run uses it (PYTEST_ARGS=)
	$(suite) --lint -m "not rare" --ignore=tests/image $(PYTEST_ARGS)

test-faults: $(VENV)/.dev ## Every fault of docs/reference/faults.md, also the slow ones; run as root for mounts and users (PYTEST_ARGS=)
	$(suite) tests/faults $(PYTEST_ARGS)

test-slow: $(VENV)/.dev ## The other slow tests: the drill on each task, tests with more real starts (PYTEST_ARGS=)
	$(suite) -m slow --ignore=tests/faults --ignore=tests/image $(PYTEST_ARGS)

test-load: $(VENV)/.dev ## The tests of test beside busy processes, to find tests that depend on speed (CORES=2, PYTEST_ARGS=)
	$(VENV)/bin/python -P -m tests.support.load --cores $(or $(CORES),2) -- $(fast)

# TEST_PYTHON=python3 uses a Python of this machine instead of .venv. It needs torch and pytest; the
# checks that need other packages are skipped if these are missing.
test-gpu: $(if $(TEST_PYTHON),,$(VENV)/.dev) ## Check Trainbox on one GPU in ten minutes; writes gpu.json and gpu.md (OUT=build/gpu, TEST_PYTHON=, PYTEST_ARGS=)
	$(checks-on-gpu)

gpu-checks: $(if $(TEST_PYTHON),,$(VENV)/.dev) ## A part of the first hour on a GPU: STEP=1 to 7; writes step-1.json and step-1.md (as test-gpu)
	$(checks-on-gpu) --step $(or $(STEP),$(error STEP is not set: name a step, as in make gpu-checks STEP=1))

checks-on-gpu = $(or $(TEST_PYTHON),$(VENV)/bin/python) -P -m pytest -c tests/gpu/pytest.ini tests/gpu $(PYTEST_ARGS)

# Two workers, since a test waits for its containers. Each worker takes whole files, so that only one
# of them packs the image for Apptainer.
test-image: $(VENV)/.dev ## Build the image and run it in Docker: minutes, and 12 GB of disk (BASE_IMAGE=, PYTEST_ARGS=)
	$(VENV)/bin/python -P -m pytest -m image -n 2 --dist loadfile -rs $(PYTEST_ARGS) tests/image

benchmark: $(VENV)/.train ## Measure the tables of docs/reference/benchmarks.md on this machine (ARGS=)
	$(VENV)/bin/python -P -m benchmarks $(ARGS)

wheel: $(VENV)/.dev ## Build one wheel with the command and the library, for machines without a checkout: build/wheel/
	$(VENV)/bin/uv build --quiet --wheel --no-build-isolation --out-dir build/wheel .
	@ls build/wheel/*.whl

lint: $(VENV)/.dev ## ruff, mypy, hadolint, shellcheck, yamllint; links, code fences and HTML of the pages
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/shellcheck .ci/run $(wildcard deploy/*/*.sh deploy/*/*.sbatch)
	$(VENV)/bin/yamllint --strict .
	$(VENV)/bin/python -P -m tests.support.markdown $(wildcard *.md .github/*.md tests/*/*.md examples/*.md examples/*/*.md docs/*.md docs/*/*.md docs/*/*/*.md)
	@echo "$(mkdocs)"; printed=$$($(mkdocs) 2>&1) || { echo "$$printed"; exit 1; }  # --quiet would hide warnings from --strict

docs: $(VENV)/.dev ## Build the pages of docs/ as HTML in build/site, and print the file to open
	$(mkdocs)
	@echo "open build/site/index.html in a browser; for the search: python3 -m http.server --bind 127.0.0.1 --directory build/site"

# The variable turns off an advertisement of the theme.
mkdocs = NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

ifneq ($(REQUIREMENTS),)
lock:
	+@$(host)
else
lock: $(VENV)/.dev ## Write both lock files after a change in pyproject.toml, or my.lock with REQUIREMENTS=my.txt (ARGS=--upgrade for the newest versions)
	$(VENV)/bin/uv pip compile --quiet pyproject.toml --universal --generate-hashes --no-emit-index-url $(ARGS) -o requirements.lock
	$(VENV)/bin/uv pip compile --quiet pyproject.toml --group dev --universal --generate-hashes --no-emit-index-url $(ARGS) \
		-c requirements.lock -o requirements-dev.lock
endif

clean: ## Remove the environment, caches and build files, but not runs/ and data/
	@$(host)
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.dev: requirements-dev.lock $(VENV)/.train | $(VENV)/bin/uv
	$(call report,installing the tools for tests and lint in $(VENV) ...)
	@$(install) $(progress) --compile-bytecode --require-hashes -r requirements-dev.lock
	@touch $@

.PHONY: test test-all test-ci test-faults test-slow test-load test-gpu gpu-checks test-image benchmark wheel lint docs lock clean
