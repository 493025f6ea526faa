# SPDX-License-Identifier: GPL-3.0-or-later
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
STAMP := .venv/.installed
PYTEST_ARGS ?=
# Two at a time: the tests wait more than they work.
PYTEST_WORKERS ?= 2

# Debian packages that the tests' lab needs, one a line, # starts a comment.
LAB_PACKAGES := tests/lab/packages.txt

# What tests/gpu/run.sh needs where nothing can be installed, and for which machine: its Python, and
# its processor and C library as wheels name them.
GPU_WHEELS_PACKAGES ?= 'ansible-core>=2.19,<2.22' pytest pytest-timeout
GPU_WHEELS_PYTHON ?= 3.12
GPU_WHEELS_PLATFORMS ?= manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

# gpuops.gpu.* means this checkout, whatever else is installed.
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/collections

MODULES = $(patsubst plugins/modules/%.py,gpuops.gpu.%,$(wildcard plugins/modules/[!_]*.py))
ROLES = $(patsubst roles/%/,gpuops.gpu.%,$(wildcard roles/*/))
# Other plugins, as KIND:NAME.
PLUGINS = $(foreach kind,callback filter,\
  $(patsubst plugins/$(kind)/%.py,$(kind):gpuops.gpu.%,$(wildcard plugins/$(kind)/[!_]*.py)))

# For each module, role and plugin: a command that uses $$kind and $$name. ansible-doc exits 0 for a name
# that it does not know, so its output has to be looked at too.
document = for each in $(MODULES:%=module:%) $(ROLES:%=role:%) $(PLUGINS); do kind=$${each%%:*} name=$${each\#*:}; $(1); done

.PHONY: help setup packages lint test unit demo bench races gpu-test gpu-wheels docs wheel clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/p' Makefile | expand -t 14

setup: packages $(STAMP) ## install what is missing: Debian packages and .venv (fast when done)

# Asks dpkg every time, which takes milliseconds, so that a stamp can never be wrong about it.
packages:
	@want=$$(sed 's/#.*//' $(LAB_PACKAGES) 2>/dev/null || true); missing=; \
	if command -v dpkg-query >/dev/null; then \
	  for p in $$want; do \
	    dpkg-query -W -f '$${db:Status-Status}\n' "$$p" 2>/dev/null | grep -qx installed || missing+=" $$p"; \
	  done; \
	fi; \
	if [ ! -x $(BIN)/python ] && ! python3 -c 'import ensurepip' 2>/dev/null; then missing+=" python3-venv"; fi; \
	[ -n "$$missing" ] || exit 0; \
	echo "setup: installing$$missing"; \
	command -v apt-get >/dev/null || { echo "setup: no apt-get here; install these yourself:$$missing" >&2; exit 1; }; \
	[ "$$(id -u)" = 0 ] || { echo "setup: not root; run: apt-get install$$missing" >&2; exit 1; }; \
	export DEBIAN_FRONTEND=noninteractive; \
	apt-get update -qq; \
	apt-get install -y -qq --no-install-recommends $$missing >/dev/null

$(STAMP): pyproject.toml gpuops/_version.py
	@python=; \
	for p in python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do \
	  if "$$p" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$p; break; fi; \
	done; \
	[ -n "$$python" ] || { echo "setup: needs Python 3.11 or newer with venv; python3 is $$(python3 --version 2>&1)" >&2; exit 1; }; \
	$(BIN)/python -c 'import pip' 2>/dev/null || "$$python" -m venv --clear .venv; \
	echo "setup: installing gpuops and its tools into .venv"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'; \
	touch $@

lint: setup ## ruff, mypy, ansible-lint, and everything in the collection has documentation
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy gpuops $(wildcard collections/ansible_collections/gpuops/gpu/plugins/module_utils)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/ansible-lint --offline --profile production
	@$(call document,text=$$($(BIN)/ansible-doc -t $$kind $$name); \
	  [[ $$text == *$$name* ]] || { echo "lint: $$kind $$name has no documentation" >&2; exit 1; })

# The HTML report is looked at in a browser, which nothing else needs.
test: lint ## everything that needs no GPU: set up, lint, all tests
	@$(MAKE) packages LAB_PACKAGES=tests/wrapper/packages.txt
	$(BIN)/pytest --ignore=tests/gpu -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

unit: setup ## the fast tests only
	$(BIN)/pytest tests/unit -m "not lab" $(PYTEST_ARGS)

demo: setup ## watch a reset in the lab, from held to clean
	$(BIN)/python -m tests.demo

bench: setup ## measure against the typed one-liner, in the lab
	$(BIN)/python -m tests.bench

races: setup ## the race tests with their full numbers, 9 minutes; writes docs/races.md
	$(BIN)/python -m tests.races

gpu-test: ## tests on a real NVIDIA GPU (root, idle GPU, no network); writes docs/real-gpu.md
	bash tests/gpu/run.sh $(PYTEST_ARGS)

# Afresh each time: two versions of a package must not meet there.
gpu-wheels: $(STAMP) ## download into .whl/ what gpu-test needs on a machine that reaches nothing
	rm -rf .whl
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --dest .whl --only-binary=:all: \
	  --implementation cp --python-version $(GPU_WHEELS_PYTHON) \
	  $(GPU_WHEELS_PLATFORMS:%=--platform %) $(GPU_WHEELS_PACKAGES)
	@ls .whl

docs: setup ## print the documentation of every module, role and plugin
	@$(call document,$(BIN)/ansible-doc -t $$kind $$name)

wheel: setup ## build wheel and source distribution into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

clean: ## remove what was built, and caches; .venv stays
	rm -rf build dist .ansible .hypothesis .mypy_cache .pytest_cache .ruff_cache gpuops-gpu-*.tar.gz
	find . -path ./.venv -prune -o -path ./.git -prune -o -name __pycache__ -type d -exec rm -rf {} +
