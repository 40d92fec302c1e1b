# SPDX-License-Identifier: Apache-2.0
# Two commands are enough: `make demo` and `make test`.  Each makes the virtual environment in .venv by itself;
# when nothing changed, that costs nothing.  Neither touches the system's Python.

# The interpreter the virtual environment is made from.  (Not called PYTHON: stestr reads a variable of that name.)
BASE_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := postgresql,mysql,rabbitmq,keystone,zookeeper,etcd,redis,memcached,redfish
# Two test processes more than there are processors, at most eight: half of their time they wait for what they have started.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); n=$$((n + 2)); [ $$n -gt 8 ] && n=8; echo $$n)
TESTS ?=
SAMPLES ?= etc/moorage

unexport PYTHON PYTHONHOME PYTHONPATH
# The tests start hundreds of processes; without compiled files each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE
# Without its own repository (an unpacked archive, a folder inside another project) pbr cannot know the version,
# and would take the tag of a repository above this folder.
ifeq ($(wildcard .git PKG-INFO),)
export PBR_VERSION ?= 0.0.0
endif

.DEFAULT_GOAL := help
.PHONY: help venv demo test coverage gabbi soak simulate check check-types check-docs check-rest format samples docs man lower clean

help:
	@echo "make demo     run a whole control plane on a recorded workload and print what came of it"
	@echo "make test     run the tests (TESTS=regex selects, WORKERS=n sets the processes)"
	@echo "make coverage unit tests, and how much of the code they run; fails below the floor in pyproject.toml"
	@echo "make gabbi    Placement's own suite over HTTP, counted file by file (DATABASES='sqlite postgresql mariadb')"
	@echo "make soak     the tests with many more random cases, and every server required; takes long, prints its seed"
	@echo "make simulate the whole control plane under a seeded scheduler (WORKLOAD=, ENGINE=, SEED=, SCHEDULES=, SECONDS=, SERIES=, MUTANTS=1)"
	@echo "make lower    unit and conformance tests with the oldest libraries that requirements.txt allows, in .venv-lower"
	@echo "make check    style, types, layers, release notes, documentation, generated samples (quicker: make -j2 check)"
	@echo "make format   put the code into the shape that 'make check' asks for"
	@echo "make docs     build the documentation into doc/build/html"
	@echo "make man      build the manual pages into doc/build/man"
	@echo "make samples  write the sample configuration and policy again into etc/moorage"
	@echo "make clean    remove everything that was built, the virtual environment too"

venv: $(VENV)/.project

# The libraries: again only when a list of them changed.
$(VENV)/.libraries: requirements.txt test-requirements.txt constraints.txt
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    { echo "Moorage needs Python 3.11 or newer as '$(BASE_PYTHON)'; name another one: make BASE_PYTHON=python3.12 ..." >&2; exit 1; }
	@$(BASE_PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "Python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || echo "making the virtual environment in $(VENV) (once; a minute or two)"
	@test -x $(BIN)/pip || $(BASE_PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements.txt -r test-requirements.txt
	@touch $@

# The project itself, editable: again only when its metadata or entry points changed.  The metadata that a build leaves in
# this folder go, since Python would find those first, with the entry points of that day.
$(VENV)/.project: $(VENV)/.libraries setup.cfg setup.py pyproject.toml
	@rm -rf moorage.egg-info
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: venv
	@$(BIN)/python -m moorage.cli.demo

# Every worker gets all tests; each takes the next class that no other has claimed (tests/queue.py).
STESTR = queue=$$(mktemp -d) && trap 'rm -rf "$$queue"' EXIT INT TERM && \
    seq $(WORKERS) | sed 's/.*/- worker: ["."]/' > "$$queue/workers.yaml" && \
    MOORAGE_TEST_QUEUE="$$queue" $(1)/stestr run --concurrency $(WORKERS) --worker-file "$$queue/workers.yaml"

test: venv
	@$(call STESTR,$(BIN)) --abbreviate $(if $(TESTS),'$(TESTS)')

# What the unit tests run by themselves. Left out are those that look at files of the project, and those that plant mistakes.
UNIT := 'tests\.unit\.(?!packaging|deployment|work\.test_guards)'
coverage: venv
	@$(BIN)/coverage erase
	@export PYTHON="$(abspath $(BIN))/coverage run"; $(call STESTR,$(BIN)) --abbreviate $(UNIT)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report --format=total --precision=2 | sed 's/^/coverage of lines and branches: /'
	@$(BIN)/coverage report >/dev/null || { echo "that is below the floor in pyproject.toml; see: $(BIN)/coverage report" >&2; exit 1; }

DATABASES ?= sqlite postgresql
gabbi: venv
	@status=0; for each in $(DATABASES); do echo "== $$each"; $(BIN)/python -m tests.api.placement.gabbits --verbose --database $$each || status=1; done; exit $$status

soak: export MOORAGE_SOAK := 1
soak: export MOORAGE_REQUIRE_SERVERS := 1
soak: export MOORAGE_SEED ?= $(shell date +%s)
soak: venv
	@echo "MOORAGE_SEED=$(MOORAGE_SEED)"
	@$(call STESTR,$(BIN)) $(TESTS)

simulate: venv
	@$(BIN)/python -m tests.simulation $(if $(WORKLOAD),--workload $(WORKLOAD)) $(if $(ENGINE),--engine $(ENGINE)) $(if $(SEED),--seed $(SEED)) \
	    $(if $(SCHEDULES),--schedules $(SCHEDULES)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SERIES),--series $(SERIES)) $(if $(MUTANTS),--mutants) $(if $(MUTANT),--mutant '$(MUTANT)')

# What requirements.txt asks for in its lowest version; everything else as constraints.txt has it.
LOWER := .venv-lower
lower:
	@test -x $(LOWER)/bin/pip || $(BASE_PYTHON) -m venv $(LOWER)
	@sed -n 's/^\([A-Za-z0-9._-]*\)>=\([0-9.]*\).*/\1==\2/p' requirements.txt > $(LOWER)/constraints.txt
	@sed 's/==.*//; s/[._-]/[._-]/g; s/^/^/; s/$$/==/' $(LOWER)/constraints.txt > $(LOWER)/replaced
	@grep -v -i -f $(LOWER)/replaced constraints.txt >> $(LOWER)/constraints.txt
	@$(LOWER)/bin/pip install --quiet --disable-pip-version-check -c $(LOWER)/constraints.txt -r requirements.txt -r test-requirements.txt
	@$(LOWER)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation -c $(LOWER)/constraints.txt -e '.[$(EXTRAS)]'
	@$(call STESTR,$(LOWER)/bin) --abbreviate $(if $(TESTS),$(TESTS),'tests\.(unit|conformance)\.')

# Not a make of its own in `check`: `make -n` would run that.
WRITE_SAMPLES = \
    $(BIN)/oslo-config-generator --config-file etc/oslo-config-generator/moorage.conf --output-file $(1)/moorage.conf.sample && \
    $(BIN)/oslopolicy-sample-generator --config-file etc/oslo-policy-generator/moorage.conf --output-file $(1)/policy.yaml.sample

# Parts, so that `make -j2 check` has two processors work.
check: check-types check-docs check-rest

check-types: venv
	$(BIN)/mypy
	cd examples/acme && MYPYPATH=../../framework:../../plugins $(abspath $(BIN))/mypy --cache-dir ../../.mypy_cache/acme

check-docs: venv
	$(BIN)/sphinx-build -q -W --keep-going -b html doc/source doc/build/html

check-rest: venv
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/reno --quiet lint
	@fresh=$$(mktemp -d) && $(call WRITE_SAMPLES,$$fresh) && diff -ru etc/moorage $$fresh; \
	    differ=$$?; rm -r $$fresh; [ $$differ = 0 ] || { echo "etc/moorage is not what the options say: run 'make samples'" >&2; exit 1; }

format: venv
	$(BIN)/ruff check --fix --quiet || true
	$(BIN)/ruff format

samples: venv
	$(call WRITE_SAMPLES,$(SAMPLES))

docs: venv
	$(BIN)/sphinx-build -q -W --keep-going -b html doc/source doc/build/html
	@echo "doc/build/html/index.html"

man: venv
	$(BIN)/sphinx-build -q -W --keep-going -b man doc/source doc/build/man
	@echo "doc/build/man"

clean:
	rm -rf $(VENV) $(LOWER) build dist doc/build *.egg-info framework/*.egg-info .eggs .stestr .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
