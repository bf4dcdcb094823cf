# `make help` lists the targets. deploy/host.py decides where a command runs: in Docker with the NVIDIA
# runtime, in Docker on the CPU, or in a virtual environment made from the lock. RUN_IN=docker-gpu,
# docker-cpu or venv overrides this, and GPUS=0 means the CPU. `make -n train GPUS=3` prints the
# commands without running them, and `make train V=1` prints the last one before it runs.

MAKEFLAGS += --no-print-directory
PYTHON ?= python3
VENV ?= .venv
IMAGE ?= trainbox
SIF ?= trainbox.sif
export MAKE VENV IMAGE MAKECMDGOALS
# make passes the settings of its command line on as environment variables.
host = $(PYTHON) -I deploy/host.py $@
report = @echo "trainbox: $(1)" >&2

help: ## List the targets
	@awk -F ':.*## ' '/^##@/ { print "\n" substr($$0, 5) } /^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Train

train: ## Train or resume: TASK=digits GPUS=3 GPU_IDS=0,2 STRATEGY=ddp SET="width=64" ARGS="--epochs 5" (CONFIG=exp.toml)
run: ## Run your own script: SCRIPT=train.py GPUS=4 ARGS="--epochs 3" (MODULE=, PROJECT_DIR=, RUN_OPTIONS="--restarts 20")
plan: ## Print the launch plan as JSON, without training (TASK=, or SCRIPT= for run)
sweep: ## Train for each combination and seed: TASK=digits ARGS="--seeds 20 --grid width=8,16" (CONFIG=, SCRIPT=, RUN_OPTIONS="--grid lr=1,2")
drill: ## Check that kills and 1 to 4 processes give the same bits (TASK=, ARGS="--steps 200"; SCRIPT=, RUN_OPTIONS="--compare last.pt")
bench: ## Measure the speed by GPUs, batch and workers (TASK=mnist ARGS="--gpus 1,2 --batch-size 64,128")
verify: ## Repeat RUN=runs/NAME and compare the digests (ARGS="--steps 100")
evaluate: ## Compute the metrics of RUN=runs/NAME again (ARGS="--data test --predictions runs/out.csv")
predict: ## Predict FILES=data/new with the weights of RUN=runs/NAME, as CSV on standard output (ARGS="--format jsonl")
export: ## Write the model of RUN=runs/NAME as a file that needs no Trainbox (ARGS="--to onnx")
runs: ## List the runs: settings that differ, best metric, state, size (ARGS="--sort metric")
tasks: ## List the tasks, or the fields of one (ARGS="images")
compare: ## Compare runs: settings, data, metrics and curves (ARGS="runs/A runs/B")
health: ## Check the GPUs, the driver and the node (ARGS="--deep")
doctor: ## Print a report to paste into a request for help
tensorboard: ## Show the curves of runs/ on http://localhost:6006 (TENSORBOARD_PORT=)
shell: ## Open a shell where train would run

train run plan sweep drill bench verify evaluate predict export runs tasks compare health doctor tensorboard shell:
	+@$(host)

##@ Install

revision = $(or $(shell git describe --always --abbrev=40 --exclude='*' --dirty 2>/dev/null),unknown)
# The seconds and the text of the commit's date, so that images of one commit have the same date.
date = $(shell TZ=UTC git log -1 --format='%ct %cd' --date=format-local:%Y-%m-%dT%H:%M:%SZ 2>/dev/null)
identity = $(if $(COMPILE),--build-arg COMPILE=$(COMPILE)) --build-arg REVISION=$(revision) \
	--build-arg VERSION=$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) \
	$(addprefix --build-arg CREATED=,$(word 2,$(date)))

build-flags = $(DOCKER_BUILD_FLAGS) $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE))

build: ## Build the image; COMPILE=1 adds what --compile needs, REQUIREMENTS=my.txt more packages (BASE_IMAGE=, DOCKER_BUILD_FLAGS=)
	$(call report,building the image $(IMAGE) (5 GB; the first build takes minutes, later ones seconds) ...)
	$(if $(REQUIREMENTS),@$(lock-in-docker))
	@docker build $(build-flags) $(addprefix --build-arg SOURCE_DATE_EPOCH=,$(firstword $(date))) $(identity) \
		$(if $(REQUIREMENTS),$(extra) --build-context requirements=$(extra-files)) --tag $(IMAGE) .

sif: $(if $(REQUIREMENTS),$(VENV)/bin/uv) ## Build trainbox.sif for Apptainer, without Docker (SIF=, COMPILE=1, REQUIREMENTS=, BASE_IMAGE=)
	$(if $(REQUIREMENTS),@$(lock-in-venv))
	$(call report,building $(SIF) (minutes) ...)
	@apptainer build $(APPTAINER_BUILD_FLAGS) $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) $(identity) \
		$(if $(REQUIREMENTS),$(extra) --build-arg REQUIREMENTS_DIR=$(extra-files)) $(SIF) deploy/apptainer/trainbox.def
	@sha256sum $(SIF) > $(SIF).sha256

# REQUIREMENTS=my.txt adds packages. my.lock, next to my.txt, has their versions and hashes. The image
# is built from copies of both files.
extra-files = build/requirements
extra = $(if $(REQUIREMENTS),--build-arg REQUIREMENTS=requirements.txt)
lock-in-venv = $(VENV)/bin/python -P deploy/extra/requirements.py lock --copy-to $(extra-files) $(filter --upgrade,$(ARGS)) -- "$(REQUIREMENTS)"
lock-in-docker = sh deploy/extra/lock-in-docker.sh "$$(docker build --quiet $(build-flags) --target uv .)" \
	$(extra-files) $(filter --upgrade,$(ARGS)) -- "$(REQUIREMENTS)"

extra-venv: $(VENV)/.train
	@$(lock-in-venv)
	@$(VENV)/bin/python -P deploy/extra/requirements.py install -- "$(REQUIREMENTS)"

# Check that an image that make does not build exists, and that it has the code of this checkout.
image:
	@found=$$(docker image inspect --format '{{index .Config.Labels "org.opencontainers.image.revision"}}' $(IMAGE)) || { \
		echo "make: Docker has no image $(IMAGE): load it, build it (docker build -t $(IMAGE) ..., or make build IMAGE=$(IMAGE)), or leave out IMAGE and BUILD" >&2; exit 2; }; \
	[ "$$found" = "$(revision)" ] || \
		echo "make: warning: the image $(IMAGE) contains trainbox of revision $${found:-unknown}, this checkout is at $(revision): build the image again to train with this checkout" >&2

lock-venv: $(VENV)/bin/uv
	@$(lock-in-venv)

lock-docker:
	@$(lock-in-docker)

include deploy/development.mk

# A target that does not exist.
.DEFAULT:
	@$(host)

env: $(VENV)/.train ## Install Trainbox without Docker, in .venv (PYTHON=python3.12, VENV=)
	@echo "trainbox is installed: source $(VENV)/bin/activate"

# pip installs only uv, with its hashes in the lock. uv then installs the environment several times
# faster than pip.
$(VENV)/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Trainbox needs Python 3.11 or newer, and $(PYTHON) is older or missing: add PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(call report,creating the virtual environment $(VENV) ...)
	@$(PYTHON) -P -m venv $(VENV)
	@awk '/^[^ #]/ { keep = /^uv==/ } keep' requirements-dev.lock > $(VENV)/uv.lock
	@$(VENV)/bin/python -P -m pip install --quiet --disable-pip-version-check --require-hashes -r $(VENV)/uv.lock

install = $(VENV)/bin/uv pip install --python $(VENV)/bin/python
# On a terminal, uv shows its progress. It always shows errors.
progress = $$(test -t 2 || echo --quiet)

$(VENV)/.train: requirements.lock pyproject.toml | $(VENV)/bin/uv
	$(call report,$(if $(wildcard $@),updating the packages in $(VENV),installing 6 GB of packages in $(VENV) (usually 1 to 10 minutes)) ...)
	@$(install) $(progress) --compile-bytecode --require-hashes -r requirements.lock
	@$(install) --quiet --no-build-isolation --no-deps --editable .
	@touch $@

.PHONY: env extra-venv image lock-venv lock-docker train run plan sweep drill bench verify evaluate predict export runs tasks compare health doctor tensorboard shell build sif help
