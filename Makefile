# `make help` lists the targets. `make -n train GPUS=3` prints the command without running it.
# `make train V=1` prints each command before it runs.
#
# make detects where to run: in Docker with the NVIDIA runtime, in Docker on the CPU, or in a
# virtual environment made from the lock. RUN_IN=docker-gpu, docker-cpu or venv overrides this.
# GPUS=0 means the CPU.

.DEFAULT_GOAL := help
.SECONDEXPANSION:

PYTHON ?= python3
VENV ?= .venv
IMAGE ?= trainbox
SIF ?= trainbox.sif
RUNS_DIR ?= $(TRAINBOX_RUNS_DIR)
DATA_DIR ?= $(TRAINBOX_DATA_DIR)
# The container mounts runs/, data/ and the folder of the task's file (TASK=folder/file.py:Class).
task-file = $(firstword $(foreach argument,$(TASK) $(ARGS),$(if $(findstring .py:,$(argument)),$(argument))))
task-folder = $(patsubst ./%,%,$(dir $(task-file)))
TASKS_DIR ?= $(patsubst %/,%,$(task-folder))
# Folders whose mount would hide runs/, data/ or the image's own files.
not-mounted = / ./ runs/ data/ /workspace/ /workspace/runs/ /workspace/data/ /tmp/ /opt/ /bin/ /sbin/ /lib/ /lib64/ \
	/usr/% /etc/% /proc/% /sys/% /dev/% /opt/venv/% /opt/trainbox/%
mountable = $(if $(filter $(not-mounted),$(if $(task-file),$(or $(task-folder),./))),$(error $(task-file): the container \
	cannot mount the folder of this file: move the file into a folder of its own, such as my_tasks/$(notdir $(task-file))))

# `make run` starts SCRIPT, or MODULE, in the folder PROJECT_DIR. The default is this folder, or the
# folder of a SCRIPT outside of it.
script-path = $(if $(filter /% ../%,$(firstword $(SCRIPT))),$(if $(word 2,$(SCRIPT)),$(error SCRIPT=$(SCRIPT) has a \
	space: set PROJECT_DIR to the folder of the script and SCRIPT to its name),$(abspath $(SCRIPT))))
PROJECT_DIR ?= $(patsubst %/,%,$(dir $(script-path)))
script = $(if $(script-path),$(patsubst $(abspath $(PROJECT_DIR))/%,%,$(script-path)),$(SCRIPT))
program = $(if $(MODULE),$(if $(SCRIPT),$(error SCRIPT and MODULE are set: name only one of them))-m $(call \
	quote,$(MODULE)),$(call quote,$(or $(script),$(error SCRIPT is not set: name a script, as in make run SCRIPT=train.py))))
program-words = $(without-config)$(RUN_OPTIONS) $(program) $(if $(ARGS),-- $(ARGS))

# CONFIG is the file of an experiment, which the container mounts.
config-at = $(if $(filter-out venv,$(kind)),$(if $(filter /% ../%,$(CONFIG)),$(notdir $(CONFIG)),$(CONFIG)),$(CONFIG))
config = $(if $(CONFIG),--config $(call quote,$(config-at)) )
config-mount = $(if $(CONFIG),-v $(call quote,$(or $(realpath $(CONFIG)),$(error CONFIG=$(CONFIG) does not \
	exist: name the file of an experiment)):/workspace/$(config-at):ro) )
# Only train, plan and sweep of a task use CONFIG. An exported variable of this name may be for the
# script itself.
without-config = $(if $(filter command,$(origin CONFIG)),$(error make $@ $(if $(SCRIPT)$(MODULE),of a script )does not use CONFIG: drop it))

quote = '$(subst ','\'',$(1))'
given = $(foreach name,$(strip $(foreach n,$(1),$(if $($(n)),$(n)))),$(name)=$(call quote,$($(name))))

# The variables that trainbox reads. TRAINBOX_<OPTION> is passed on as well.
settings = $(call given,GPUS GPU_IDS STRATEGY PROCESSES DEVICE NNODES NODE_RANK RDZV_ENDPOINT RDZV_ID RDZV_TIMEOUT_S TASK SET HEALTH HEALTH_LIMITS)

# The path of the Compose plugin and the engine's runtimes, or nothing without an engine. This is
# evaluated once, and only if it is needed.
docker = $(eval docker := $(shell answer=$$(docker info --format \
	'{{range .ClientInfo.Plugins}}{{if eq .Name "compose"}}{{.Path}}{{end}}{{end}} {{range $$k, $$_ := .Runtimes}}{{$$k}} {{end}}' \
	2>/dev/null) && echo "$$answer" || $(no-engine)))$(docker)
no-engine = ! command -v docker >/dev/null || [ $(origin RUN_IN) != file ] || echo "trainbox: Docker does not reach an \
	engine: the virtual environment $(VENV) is used; start Docker, or set RUN_IN=venv" >&2
compose = $(filter %docker-compose,$(docker))
RUN_IN ?= $(if $(compose),$(if $(filter nvidia,$(docker)),docker-gpu,$(docker-without-gpu)),venv)
# If the host has a GPU that Docker cannot use, make fails instead of training on the CPU. WSL2 has
# /dev/dxg for the GPUs of all vendors, and this library if one of them is NVIDIA's.
NVIDIA_DEVICE ?= /dev/nvidiactl /usr/lib/wsl/lib/libcuda.so.1
host-gpu = $(if $(filter-out 0,$(or $(GPUS),all)),$(firstword $(wildcard $(NVIDIA_DEVICE))))
docker-without-gpu = $(if $(host-gpu),$(error this host has an NVIDIA GPU ($(host-gpu)), and Docker has no NVIDIA runtime: install \
	nvidia-container-toolkit, or set RUN_IN=docker-gpu (CDI, Docker Desktop), RUN_IN=venv, or GPUS=0 for the CPU),docker-cpu)
runs_in = $(if $(filter 0,$(GPUS)),$(RUN_IN:docker-gpu=docker-cpu),$(RUN_IN))

# venv: run directly from the checkout.
in-venv = env TRAINBOX_COMMAND=make $(settings) $(if $(RUNS_DIR),TRAINBOX_RUNS_DIR=$(call quote,$(RUNS_DIR))) \
	$(if $(DATA_DIR),TRAINBOX_DATA_DIR=$(call quote,$(DATA_DIR))) $(VENV)/bin
train-venv = $(in-venv)/trainbox
script-venv = $(if $(PROJECT_DIR),cd $(call quote,$(PROJECT_DIR)) && exec env TRAINBOX_COMMAND=make $(settings) \
	TRAINBOX_RUNS_DIR=$(call quote,$(abspath $(or $(RUNS_DIR),runs))) $(abspath $(VENV))/bin/trainbox,$(in-venv)/trainbox)
run-venv = $(script-venv) run
health-venv = $(in-venv)/trainbox health
doctor-venv = $(in-venv)/trainbox doctor
shell-venv = env PATH="$(abspath $(VENV))/bin:$$PATH" $${SHELL:-sh}
tensorboard-venv = $(VENV)/bin/tensorboard --logdir $(or $(RUNS_DIR),runs) --host 127.0.0.1 \
	--port $(or $(TENSORBOARD_PORT),6006)
ready-venv = $(VENV)/.train $(if $(REQUIREMENTS),extra-venv)

# Compose names the project by user and PWD. After `make -C`, PWD is still the caller's folder.
checkout = $(if $(filter $(CURDIR),$(realpath $(PWD))),$(PWD),$(CURDIR))
# If more GPUs are requested than the host has, Docker fails with its own message and exit code. The
# container therefore gets all GPUs, and trainbox checks the number.
HOST_GPUS ?= $(wildcard /proc/driver/nvidia/gpus/*)
countable = $(filter $(GPUS),$(wordlist 1,$(words $(HOST_GPUS)),1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16))

# docker: with `run` instead of `up`, the exit code is trainbox's own, and two trainings do not
# replace each other. The plugin is called by its path, because `docker compose run` without a
# terminal exits at SIGTERM and leaves the container running.
files-docker-cpu = -f docker-compose.yml -f docker-compose.cpu.yml
# Not on one node, because Docker without root cannot lift the limit of locked memory.
INFINIBAND ?= $(wildcard /dev/infiniband)
files-network = $(if $(and $(filter-out 1,$(NNODES)),$(INFINIBAND)),$(if $(files-$(runs_in)),,-f docker-compose.yml) \
	-f docker-compose.infiniband.yml)
in-docker = env UID=$(shell id -u) GID=$(shell id -g) PWD=$(call quote,$(checkout)) IMAGE=$(IMAGE) \
	TRAINBOX_COMMAND=make \
	$(if $(filter-out 1,$(NNODES)),NETWORK_MODE=host) $(if $(or $(GPU_IDS),$(if $(countable),,$(GPUS))),GPU_COUNT=all) \
	$(if $(filter /%,$(TASKS_DIR)),TASKS_AT=$(call quote,$(TASKS_DIR))) \
	$(call given,RUNS_DIR DATA_DIR TASKS_DIR PROJECT_DIR TENSORBOARD_PORT HEALTH_PORT) $(settings) \
	$(or $(compose),docker compose) $(files-$(runs_in)) $(files-network)
# Variables with paths of this machine are not passed on to the container.
handed-on = TRAINBOX_% NCCL_% GLOO_% TORCH_% PYTORCH_% CUDA_LAUNCH_BLOCKING OMP_NUM_THREADS
options = $(addprefix -e ,$(sort $(filter-out %_DIR TORCH_HOME TRAINBOX_HEARTBEAT TRAINBOX_BUILD_INFO TRAINBOX_IMAGE_DIGEST \
	TRAINBOX_COMMAND,$(filter $(handed-on),$(.VARIABLES)))))
train-docker = $(in-docker) run --rm --no-deps $(config-mount)$(options) train
# The service `run` has another entrypoint, so that its arguments are those of `trainbox run`.
run-docker = $(in-docker) run --rm --no-deps $(options) run
script-docker = $(in-docker) run --rm --no-deps --entrypoint 'tini -- trainbox' $(options) run
script-runs-docker = --runs-dir /workspace/runs
health-docker = $(in-docker) run --rm --no-deps $(options) gpu-health health
doctor-docker = $(in-docker) run --rm --no-deps $(options) train doctor
shell-docker = $(in-docker) run --rm --no-deps train bash
tensorboard-docker = $(in-docker) up --no-deps tensorboard
# Only this repository's own tag is built. BUILD=0 uses the existing image, for example without a
# network. BUILD=1 builds any tag.
BUILD ?= $(if $(filter trainbox trainbox:latest,$(IMAGE)),1,0)
ready-docker = $(mountable)$(if $(filter 0,$(BUILD)),image,build) folders

kind = $(if $(filter docker-gpu docker-cpu venv,$(runs_in)),$(firstword $(subst -, ,$(runs_in))),$(error \
	RUN_IN=$(RUN_IN) is unknown: set RUN_IN=docker-gpu, docker-cpu or venv))

# A user sees what a target does, not its commands. V=1 prints the commands as well.
Q := $(if $(filter 1,$(V)),,@)
report = @echo "trainbox: $(1)" >&2

# The output of these targets is for other programs or for pasting, so make never prints their
# commands.
ifneq ($(filter plan predict health doctor,$(MAKECMDGOALS)),)
.SILENT:
MAKEFLAGS += --no-print-directory
endif

##@ Train

# The image's digest for the manifest. It is exported, because with an assignment in the command
# make would start a shell that does not forward signals.
digest-docker = $(shell docker image inspect --format '{{.Id}}' $(IMAGE) 2>/dev/null)
train run: export TRAINBOX_IMAGE_DIGEST = $(digest-$(kind))

train: $$(ready-$$(kind)) ## Train or resume: TASK=digits GPUS=3 GPU_IDS=0,2 STRATEGY=ddp SET="width=64" ARGS="--epochs 5" (CONFIG=exp.toml)
	$(Q)$(train-$(kind)) train $(config)$(ARGS)

# A script may download its data to ./data of its project, which Docker mounts read-only otherwise.
run plan sweep drill: project-data = $(if $(SCRIPT)$(MODULE),$(call quote,$(or $(PROJECT_DIR),.)/data))
run: $$(ready-$$(kind)) ## Run your own script: SCRIPT=train.py GPUS=4 ARGS="--epochs 3" (MODULE=, PROJECT_DIR=, RUN_OPTIONS="--restarts 20")
	$(Q)$(run-$(kind)) $(program-words)

plan: $$(ready-$$(kind)) ## Print the launch plan as JSON, without training (TASK=, or SCRIPT= for run)
	$(if $(SCRIPT)$(MODULE),$(script-$(kind)) plan run $(script-runs-$(kind)) $(program-words),$(train-$(kind)) plan $(config)$(ARGS))

sweep: $$(ready-$$(kind)) ## Train for each combination and seed: TASK=digits ARGS="--seeds 20 --grid width=8,16" (CONFIG=, SCRIPT=, RUN_OPTIONS="--grid lr=1,2")
	$(Q)$(if $(SCRIPT)$(MODULE),$(script-$(kind)) sweep run $(script-runs-$(kind)) $(program-words),$(train-$(kind)) sweep $(config)$(ARGS))

drill: $$(ready-$$(kind)) ## Check that kills and 1 to 4 processes give the same bits (TASK=, ARGS="--steps 200"; SCRIPT=, RUN_OPTIONS="--compare last.pt")
	$(Q)$(if $(SCRIPT)$(MODULE),$(script-$(kind)) drill run $(program-words),$(without-config)$(train-$(kind)) drill $(ARGS))

bench: $$(ready-$$(kind)) ## Measure the speed by GPUs, batch and workers (TASK=mnist ARGS="--gpus 1,2 --batch-size 64,128 --suggest")
	$(Q)$(without-config)$(train-$(kind)) bench $(ARGS)

of-run = $(or $(RUN),$(error RUN is not set: name a run, as in make $@ RUN=runs/NAME))

verify: $$(ready-$$(kind)) ## Repeat RUN=runs/NAME and compare the digests (ARGS="--steps 100")
	$(Q)$(without-config)$(train-$(kind)) verify $(of-run) $(ARGS)

evaluate: $$(ready-$$(kind)) ## Compute the metrics of RUN=runs/NAME again (ARGS="--data test --predictions runs/out.csv")
	$(Q)$(without-config)$(train-$(kind)) evaluate $(of-run) $(ARGS)

predict: $$(ready-$$(kind)) ## Predict FILES=data/new with the weights of RUN=runs/NAME, as CSV on standard output (ARGS="--format jsonl")
	$(without-config)$(train-$(kind)) predict $(ARGS) -- $(of-run) $(or $(FILES),$(error FILES is not set: name files or folders, as in make predict RUN=runs/NAME FILES=data/new))

export: $$(ready-$$(kind)) ## Write the model of RUN=runs/NAME as a file that needs no Trainbox (ARGS="--to onnx")
	$(Q)$(without-config)$(train-$(kind)) export $(of-run) $(ARGS)

health: $$(ready-$$(kind)) ## Check the GPUs, the driver and the node (ARGS="--deep")
	$(health-$(kind)) $(ARGS)

doctor: $$(ready-$$(kind)) ## Print a report to paste into a request for help
	$(doctor-$(kind)) $(ARGS)

tensorboard: $$(ready-$$(kind)) ## Show the curves of runs/ on http://localhost:6006 (TENSORBOARD_PORT=)
	$(call report,TensorBoard is at http://localhost:$(or $(TENSORBOARD_PORT),6006) (if the port is taken: make tensorboard TENSORBOARD_PORT=7007))
	$(Q)$(tensorboard-$(kind))

shell: $$(ready-$$(kind)) ## Open a shell where train would run
	$(Q)$(shell-$(kind))

benchmark: $(VENV)/.train ## Run the benchmarks on this machine (ARGS=)
	$(Q)$(VENV)/bin/python -P -m benchmarks $(ARGS)

##@ Image

revision = $(or $(shell git describe --always --abbrev=40 --exclude='*' --dirty 2>/dev/null),unknown)
# The seconds and the text of the commit's date, so that images of one commit have the same date.
date = $(shell TZ=UTC git log -1 --format='%ct %cd' --date=format-local:%Y-%m-%dT%H:%M:%SZ 2>/dev/null)
identity = $(if $(COMPILE),--build-arg COMPILE=$(COMPILE)) --build-arg REVISION=$(revision) \
	--build-arg VERSION=$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) \
	$(addprefix --build-arg CREATED=,$(word 2,$(date)))

build-flags = $(DOCKER_BUILD_FLAGS) $(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE))

build: ## Build the image; COMPILE=1 adds what --compile needs, REQUIREMENTS=my.txt more packages (BASE_IMAGE=, DOCKER_BUILD_FLAGS=)
	$(call report,building the image $(IMAGE) (5 GB; the first build takes minutes, later ones seconds) ...)
	$(if $(REQUIREMENTS),$(Q)$(lock-docker))
	$(Q)docker build $(build-flags) $(addprefix --build-arg SOURCE_DATE_EPOCH=,$(firstword $(date))) $(identity) \
		$(if $(REQUIREMENTS),$(extra) --build-context requirements=$(extra-files)) --tag $(IMAGE) .

sif: $(if $(REQUIREMENTS),$(VENV)/bin/uv) ## Build trainbox.sif for Apptainer without Docker, or of an image with FROM=docker-daemon:trainbox:latest (SIF=, COMPILE=1, REQUIREMENTS=, BASE_IMAGE=)
	$(if $(REQUIREMENTS),$(if $(FROM),$(error an image cannot get packages when it is converted: set FROM or REQUIREMENTS, not both))$(Q)$(lock-venv))
	$(call report,building $(SIF) (minutes) ...)
	$(Q)apptainer build $(APPTAINER_BUILD_FLAGS) $(if $(FROM),$(SIF) $(FROM),$(if $(BASE_IMAGE),--build-arg BASE_IMAGE=$(BASE_IMAGE)) \
		$(identity) $(if $(REQUIREMENTS),$(extra) --build-arg REQUIREMENTS_DIR=$(extra-files)) $(SIF) deploy/apptainer/trainbox.def)
	$(Q)sha256sum $(SIF) > $(SIF).sha256

# REQUIREMENTS=my.txt adds packages. my.lock, next to my.txt, has their versions and hashes. The image
# is built from copies of both files.
extra-files = build/requirements
extra = $(if $(REQUIREMENTS),--build-arg REQUIREMENTS=requirements.txt)
lock-venv = $(VENV)/bin/python -P deploy/extra/requirements.py lock --copy-to $(extra-files) $(1) -- $(call quote,$(REQUIREMENTS))
lock-docker = sh deploy/extra/lock-in-docker.sh "$$(docker build --quiet $(build-flags) --target uv .)" \
	$(extra-files) $(1) -- $(call quote,$(REQUIREMENTS))

extra-venv: $(VENV)/.train
	$(Q)$(lock-venv)
	$(Q)$(VENV)/bin/python -P deploy/extra/requirements.py install -- $(call quote,$(REQUIREMENTS))

# Check that an image that make does not build exists, and that it has the code of this checkout.
image:
	@found=$$(docker image inspect --format '{{index .Config.Labels "org.opencontainers.image.revision"}}' $(IMAGE)) || { \
		echo "make: Docker has no image $(IMAGE): load it, build it (docker build -t $(IMAGE) ..., or make build IMAGE=$(IMAGE)), or leave out IMAGE and BUILD" >&2; exit 2; }; \
	[ "$$found" = "$(revision)" ] || \
		echo "make: warning: the image $(IMAGE) contains trainbox of revision $${found:-unknown}, this checkout is at $(revision): build the image again to train with this checkout" >&2

# make creates the mounts, because folders that the daemon creates belong to root.
folders:
	@mkdir -p $(or $(RUNS_DIR),runs) $(or $(DATA_DIR),data) $(or $(TASKS_DIR),my_tasks) $(project-data)

##@ Work on Trainbox

suite = $(VENV)/bin/python -P -m tests.support.suite
fast = $(suite) -m "not slow" --ignore=tests/image $(PYTEST_ARGS)

test: $(VENV)/.dev ## Lint, and every test except the slow ones and those of the image (PYTEST_ARGS=)
	$(fast) --lint

test-all: $(VENV)/.dev ## test, test-faults and test-slow together, each test once (PYTEST_ARGS=)
	$(suite) --lint --ignore=tests/image $(PYTEST_ARGS)

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

wheel: $(VENV)/.dev ## Build one wheel with the command and the library, for machines without a checkout: build/wheel/
	$(VENV)/bin/uv build --quiet --wheel --no-build-isolation --out-dir build/wheel .
	@ls build/wheel/*.whl

lint: $(VENV)/.dev ## ruff, mypy, hadolint, shellcheck, yamllint; plain English; links, code fences and HTML of the pages
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/shellcheck .ci/run $(wildcard deploy/*/*.sh deploy/*/*.sbatch)
	$(VENV)/bin/yamllint --strict .
	$(VENV)/bin/python -P -m tests.support.phrases
	$(VENV)/bin/python -P -m tests.support.markdown $(wildcard *.md .github/*.md tests/*/*.md examples/*.md examples/*/*.md docs/*.md docs/*/*.md docs/*/*/*.md)
	@echo "$(mkdocs)"; printed=$$($(mkdocs) 2>&1) || { echo "$$printed"; exit 1; }  # --quiet would hide warnings from --strict

docs: $(VENV)/.dev ## Build the pages of docs/ as HTML in build/site, and print the file to open
	$(mkdocs)
	@echo "open build/site/index.html in a browser"

# The variable turns off an advertisement of the theme.
mkdocs = NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

ifneq ($(REQUIREMENTS),)
lock: $(if $(filter venv,$(kind)),$(VENV)/bin/uv)
	$(Q)$(call lock-$(kind),$(filter --upgrade,$(ARGS)))
else
lock: $(VENV)/.dev ## Write both lock files after a change in pyproject.toml, or my.lock with REQUIREMENTS=my.txt (ARGS=--upgrade for the newest versions)
	$(VENV)/bin/uv pip compile --quiet pyproject.toml --universal --generate-hashes --no-emit-index-url $(ARGS) -o requirements.lock
	$(VENV)/bin/uv pip compile --quiet pyproject.toml --group dev --universal --generate-hashes --no-emit-index-url $(ARGS) \
		-c requirements.lock -o requirements-dev.lock
endif

clean: ## Remove the environment, caches and build files, but not runs/ and data/
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## List the targets
	@awk -F ':.*## ' '/^##@/ { print "\n" substr($$0, 5) } /^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# pip installs only uv, with its hashes in the lock. uv then installs the environment several times
# faster than pip.
$(VENV)/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Trainbox needs Python 3.11 or newer, and $(PYTHON) is older or missing: add PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(call report,creating the virtual environment $(VENV) ...)
	$(Q)$(PYTHON) -P -m venv $(VENV)
	$(Q)awk '/^[^ #]/ { keep = /^uv==/ } keep' requirements-dev.lock > $(VENV)/uv.lock
	$(Q)$(VENV)/bin/python -P -m pip install --quiet --disable-pip-version-check --require-hashes -r $(VENV)/uv.lock

install = $(VENV)/bin/uv pip install --python $(VENV)/bin/python
# On a terminal, uv shows its progress. It always shows errors.
progress = $$(test -t 2 || echo --quiet)

$(VENV)/.train: requirements.lock pyproject.toml | $(VENV)/bin/uv
	$(call report,$(if $(wildcard $@),updating the packages in $(VENV),installing 6 GB of packages in $(VENV) (usually 1 to 10 minutes)) ...)
	$(Q)$(install) $(progress) --compile-bytecode --require-hashes -r requirements.lock
	$(Q)$(install) --quiet --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.train | $(VENV)/bin/uv
	$(call report,installing the tools for tests and lint in $(VENV) ...)
	$(Q)$(install) $(progress) --compile-bytecode --require-hashes -r requirements-dev.lock
	@touch $@

.PHONY: train run plan sweep drill bench verify evaluate predict export health doctor tensorboard shell benchmark build sif extra-venv image folders test test-all test-faults test-slow test-load test-gpu gpu-checks test-image wheel lint docs lock clean help
