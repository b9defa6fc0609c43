# What people and CI run. Everything works from a fresh clone; tools that are missing are fetched into
# $XDG_CACHE_HOME/modelrelay (default ~/.cache/modelrelay), never into the repository.

# `make test` is for each change; `make test-all` adds what needs more time, root, or a cluster.
TEST = fmt lint unit histories simulation contract clients engine browser docs chart
TEST_MORE = images cluster backends chaos speed windows fuzz wheel rustdoc publish deny workflows

.PHONY: help run check test test-all chaos soak test-backends test-clients test-browser picture test-cluster autobahn simulation fuzz bench docs images release cluster cluster-down generate

help: ## What there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

run: ## Build the program and run `modelrelay up`: relay and worker for a backend of this machine, or for the demo one
	@scripts/run

check: ## The quick inner loop: format, lints, unit tests
	@scripts/test fmt lint unit

test: ## The suites for each change, side by side
	@scripts/test $(TEST)

test-all: ## Everything that CI runs: `make test`, a cluster, inference servers, Windows, faults, fuzzing, images
	@SEEDS=1000 scripts/test $(TEST) $(TEST_MORE)

chaos: ## The programs under faults and too much load, much longer than in `make test-all`; on Linux, mostly as root
	@MODELRELAY_CHAOS_FACTOR=$${MODELRELAY_CHAOS_FACTOR:-10} MODELRELAY_SOAK_MINUTES=$${MODELRELAY_SOAK_MINUTES:-10} scripts/test chaos

soak: ## Half an hour at 70 % load while things are killed: nothing may grow; MODELRELAY_SOAK_MINUTES asks for another time
	@MODELRELAY_SOAK_MINUTES=$${MODELRELAY_SOAK_MINUTES:-30} scripts/test soak

test-clients: ## Real clients (SDKs, LangChain, LiteLLM, Claude Code …) against relay and worker
	@scripts/test clients

test-browser: ## The relay's pages in Chromium, against relay and workers; pictures of them end in target/browser
	@scripts/test browser

picture: ## The README's picture of the dashboard, renewed from a fleet at work; takes some minutes
	@scripts/test build tools && MODELRELAY_PICTURE=1 tests/browser/run

autobahn: ## Autobahn's WebSocket test suite against the relay's own socket
	@scripts/test autobahn

test-backends: ## The worker and the multiplexer against real vLLM, llama-server and Ollama, which are built the first time
	@scripts/test backends

test-cluster: ## The programs on a real Kubernetes cluster, on Linux as root; its binaries take ten minutes the first time
	@scripts/test cluster

simulation: ## Relay and worker on a simulated network under faults: seeds of chance for MINUTES= (10), or SEED= and all that happens
	@MINUTES=$(or $(MINUTES),10) scripts/simulation run

fuzz: ## Ten minutes of each fuzz target; MINUTES= and TARGETS= ask for more or less
	@scripts/fuzz long $(or $(MINUTES),10) $(TARGETS)

docs: ## The documentation as a book, in target/book; `scripts/docs test` runs every command in it
	@scripts/docs build

bench: ## How fast it is beside nginx, haproxy and other routers; QUICK=1, ROUNDS=, ONLY= and SYSTEMS= ask for less, ONLY=scale how far it goes
	@scripts/bench

images: ## Container images of the three programs in target/images, without a container engine
	@scripts/images

release: ## What is published, in target/dist: static programs for two processors, images, the chart, bills of materials, checksums
	@scripts/release

cluster: ## A real local cluster with the chart and its demo, on Linux as root
	@scripts/cluster/demo

cluster-down: ## End that cluster and remove it
	@scripts/cluster/down

generate: ## Write the CRDs and their reference from the Rust types, what is made from the chart, and the documentation's tables
	cargo build --quiet --locked -p modelrelay-operator -p modelrelay-relay -p modelrelay-worker -p modelrelay-all-in-one
	target/debug/modelrelay-operator crds --write crds
	target/debug/modelrelay-operator crds --write charts/modelrelay/files/crds
	target/debug/modelrelay-operator crds --reference > docs/reference/resources.md
	scripts/chart generate
	MODELRELAY_BIN_DIR=target/debug scripts/docs generate
