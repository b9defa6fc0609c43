# The commands for people and for CI. Everything works from a fresh clone; missing tools are fetched into
# $XDG_CACHE_HOME/modelrelay (default ~/.cache/modelrelay), never into the repository.

# `make test` is for each change. `make test-all` adds the suites that need more time, root, or a cluster.
TEST = fmt lint unit histories simulation contract clients engine browser docs chart
TEST_MORE = spec images cluster backends chaos speed windows fuzz wheel rustdoc publish deny workflows

# `make replay` uses the suites' compiled libraries, and optimizes the crates that it spends its time in.
REPLAY_PROFILE = $(foreach crate,bench relay,--config profile.dev.package.modelrelay-$(crate).opt-level=1)

.PHONY: help run check test test-all chaos soak test-backends test-clients test-browser picture test-cluster autobahn simulation fuzz bench replay docs images release cluster cluster-down generate

help: ## List these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

run: ## Build the program and run `modelrelay up`: relay and worker for a backend on this machine, or for the demo backend
	@scripts/run

check: ## The quick inner loop: format, lints, unit tests
	@scripts/test fmt lint unit

test: ## The suites for each change, in parallel
	@scripts/test $(TEST)

test-all: ## Everything that CI runs: `make test`, a cluster, inference servers, Windows, faults, fuzzing, images
	@SEEDS=600 HISTORY_TRANSITIONS=50000 scripts/test $(TEST) $(TEST_MORE)

chaos: ## The programs under faults and overload, much longer than in `make test-all`; on Linux, mostly as root
	@MODELRELAY_CHAOS_FACTOR=$${MODELRELAY_CHAOS_FACTOR:-10} MODELRELAY_SOAK_MINUTES=$${MODELRELAY_SOAK_MINUTES:-10} scripts/test chaos

soak: ## Half an hour at 70 % load while processes are killed: nothing may grow; MODELRELAY_SOAK_MINUTES sets another duration
	@MODELRELAY_SOAK_MINUTES=$${MODELRELAY_SOAK_MINUTES:-30} scripts/test soak

test-clients: ## Real clients (SDKs, LangChain, LiteLLM, Claude Code …) against relay and worker
	@scripts/test clients

test-browser: ## The relay's pages in Chromium, against relay and workers; screenshots are written to target/browser
	@scripts/test browser

picture: ## Update the README's picture of the dashboard from a fleet under load; takes some minutes
	@scripts/test build tools && MODELRELAY_PICTURE=1 tests/browser/run

autobahn: ## Autobahn's WebSocket test suite against the relay's own socket
	@scripts/test autobahn

test-backends: ## The worker and the multiplexer against real vLLM, llama-server and Ollama, which are built the first time
	@scripts/test backends

test-cluster: ## The programs on a real Kubernetes cluster, on Linux as root; building its binaries takes ten minutes the first time
	@scripts/test cluster

simulation: ## Relay and worker on a simulated network under faults: random seeds for MINUTES= (10), or SEED= with a full log of one run
	@MINUTES=$(or $(MINUTES),10) scripts/simulation run

fuzz: ## Ten minutes of each fuzz target; MINUTES= and TARGETS= change that
	@scripts/fuzz long $(or $(MINUTES),10) $(TARGETS)

docs: ## The documentation as a book, in target/book; `scripts/docs test` runs every command in it
	@scripts/docs build

bench: ## Measure speed in comparison with nginx, haproxy and other routers; QUICK=1, ROUNDS=, ONLY= and SYSTEMS= measure less, ONLY=scale measures the limits
	@scripts/bench

replay: ## Ways to place requests, compared in simulated time: writes docs/placement.md, or prints a part with ARGS=; fails if a rule is broken
	@cargo run --quiet --locked $(REPLAY_PROFILE) -p modelrelay-bench --bin replay-placement -- $(or $(ARGS),--write docs/placement.md)

images: ## Container images of the three programs in target/images, without a container engine
	@scripts/images

release: ## The files of a release, in target/dist: static programs for two processors, images, the chart, bills of materials, checksums
	@scripts/release

cluster: ## A real local cluster with the chart and its demo, on Linux as root
	@scripts/cluster/demo

cluster-down: ## Stop and remove that cluster
	@scripts/cluster/down

generate: ## Write the CRDs and their reference from the Rust types, the files made from the chart, and the documentation's tables
	cargo build --quiet --locked -p modelrelay-operator -p modelrelay-relay -p modelrelay-worker -p modelrelay-all-in-one
	target/debug/modelrelay-operator crds --write charts/modelrelay/files/crds
	target/debug/modelrelay-operator crds --reference > docs/reference/resources.md
	scripts/chart generate
	MODELRELAY_BIN_DIR=target/debug scripts/docs generate
