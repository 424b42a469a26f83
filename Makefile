# Each target sets up .venv from requirements.lock when it is missing or the lock has changed.
#   make report                  run the notebooks and write outputs/smoke/html/index.html
#   make report PROFILE=cpu      the committed report's profile
#   make test                    the whole test suite
#   make lab                     JupyterLab on the notebooks
#   make paper                   paper/main.pdf from the committed results; needs LaTeX and says which packages

PYTHON ?= python3.11
PROFILE ?= smoke
BIN := .venv/bin
INSTALLED := .venv/.installed

LATEX := texlive-latex-recommended texlive-pictures texlive-fonts-recommended lmodern latexmk

.PHONY: report test lab paper latex lock

report: $(INSTALLED)
	$(BIN)/predmoe report --profile $(PROFILE)

test: $(INSTALLED)
	$(BIN)/python -m pytest

lab: $(INSTALLED)
	$(BIN)/jupyter lab notebooks --ServerApp.jpserver_extensions=predmoe.lab=True $(if $(filter 0,$(shell id -u)),--allow-root)

# The committed report's profile unless another is named; PAPER_OPTIONS=--any-commit takes results of several commits.
paper: PROFILE = cpu
paper: latex $(INSTALLED)
	$(BIN)/predmoe paper --profile $(PROFILE) $(PAPER_OPTIONS)

# Nothing is installed here: what a system lacks is for its owner to add.
latex:
	@command -v latexmk >/dev/null && command -v pdflatex >/dev/null && command -v bibtex >/dev/null || { \
	  echo "The paper needs LaTeX. Debian: apt-get install --no-install-recommends $(LATEX)"; exit 1; }

# Resolve pyproject.toml anew and rewrite requirements.lock.
lock:
	$(PYTHON) scripts/lock.py

# The second installation adds predmoe itself and what this platform needs besides the lock, such as the libraries of
# torch's CUDA build; on a CPU build it finds everything in place.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "predmoe needs Python 3.11 with its venv module as '$(PYTHON)' (Debian: apt install python3.11-venv)."; \
	  echo "If it has another name: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up .venv from requirements.lock (a few minutes, about 2 GB)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --no-deps -r requirements.lock
	$(BIN)/python -m pip install --no-build-isolation -c requirements.lock -e '.[test,eval]'
	$(BIN)/python -m pip install --no-deps libcachesim==0.3.5
	$(BIN)/python -c 'import torch, predmoe; print("torch", torch.__version__, "is ready")'
	@touch $@
