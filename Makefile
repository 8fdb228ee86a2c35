# Every target does its own set-up; `make PYTHON=...` names another interpreter to make the environment with.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
P2Q_VENV ?= .venv

BIN := $(if $(filter /%,$(P2Q_VENV)),,$(CURDIR)/)$(P2Q_VENV)/bin
TYPED := build/typed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint wheel clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 12

setup: ## make or update the virtual environment
	@P2Q_VENV="$(P2Q_VENV)" $(PYTHON) scripts/setup_env.py

demo: setup ## convert, serve and prove a small real model on this CPU
	"$(BIN)/p2q" demo --out build/demo

test: lint ## lint, then run the tests; ARGS="-k scales" chooses some
	"$(BIN)/python" -m pytest $(ARGS)

# mypy names a module by its path, and serve/ is imported as p2q.serve: show it a tree of links with the real names.
lint: setup ## check style, formatting and types
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy" scripts/setup_env.py
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/p2q
	@ln -s "$(CURDIR)"/p2q/* "$(CURDIR)"/{eval,patches,serve} $(TYPED)/p2q/
	cd $(TYPED) && "$(BIN)/mypy" --config-file ../../pyproject.toml -p p2q | sed -E 's#^p2q/(eval|patches|serve)/#\1/#'

wheel: setup ## build dist/*.whl
	@rm -rf build/lib build/bdist.*
	"$(BIN)/python" -m build --wheel --no-isolation

clean: ## remove what was built, but not the virtual environment
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
