# The bodies of the suites, one function each: scripts/suites.py runs them. Sourced in the root of the repository.
#
# A body that cannot run on this machine exits with 77 and prints one line with the reason.
# shellcheck shell=bash
set -u -o pipefail
. scripts/debian.bash
. scripts/tools.bash

CANNOT_RUN=77
HISTORY_TRANSITIONS=${HISTORY_TRANSITIONS:-25000}
SEEDS=${SEEDS:-200}

target=${CARGO_TARGET_DIR:-$PWD/target}
suites=$target/suites
# The tested programs are those of the dev profile, which `build` makes. Clippy compiles our own crates, so that its
# lints are known after the build, without compiling all libraries a second time.
export MODELRELAY_BIN_DIR=${MODELRELAY_BIN_DIR:-$target/debug}
[ "${CI:-}" != true ] || export CARGO_INCREMENTAL=0
linting_cargo() { RUSTC_WORKSPACE_WRAPPER=clippy-driver cargo "$@"; }

# The crates of tests that only `make test-all` runs.
MORE=(modelrelay-chaos modelrelay-cluster)

suite_build() {
  build_tests build "${MORE[@]/#/--exclude=}" &&
    # nextest needs this to run the tests without cargo, whose lock would make suites wait for each other.
    cargo metadata --format-version 1 --locked > "$suites/metadata.json"
}

# What `build` left out.
suite_build-more() { build_tests build-more && python3 scripts/lints.py "$suites/build-more.jsonl"; }

# NAME ARGUMENTS...: builds the programs and the tests of the crates that the arguments select, and lists them in files for
# run_tests.
build_tests() {
  local name=$1
  shift
  rustup_component clippy clippy || return
  mkdir -p "$suites"
  # All at once: for a single crate, its libraries would be compiled again with fewer features.
  linting_cargo build --workspace "$@" --bins --tests --locked --message-format json > "$suites/$name.jsonl" ||
    { python3 scripts/lints.py "$suites/$name.jsonl"; return 1; }
  tool cargo-nextest || return
  linting_cargo nextest list --workspace "$@" --locked --list-type binaries-only --message-format json > "$suites/$name.json"
}

# All of them, even where one before it failed.
suite_lint() {
  local failed=0
  python3 scripts/lints.py "$suites/build.jsonl" || failed=1
  PYTHONPATH=scripts python3 -m unittest discover -q -s tests/checks || failed=1
  python3 scripts/layers.py || failed=1
  python3 scripts/words.py || failed=1
  return "$failed"
}

# Private items included: every link must resolve.
suite_rustdoc() {
  RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --workspace --no-deps --document-private-items --locked
}

# The oldest compiler that Cargo.toml promises. In a folder of its own: in a shared one, two compilers would each
# compile everything again.
suite_msrv() {
  local oldest
  oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  rustup toolchain install "$oldest" --profile minimal > /dev/null || {
    echo "cannot run: rustup cannot install Rust $oldest"
    return "$CANNOT_RUN"
  }
  cargo "+$oldest" check --workspace --all-targets --locked --target-dir "$target/msrv"
}

# Pushes the images and the chart to a registry on this machine.
suite_publish() { scripts/publish test; }

suite_fmt() {
  rustup_component fmt rustfmt || return
  cargo fmt --all --check &&
    cargo fmt --manifest-path tests/simulation/Cargo.toml --check && cargo fmt --manifest-path fuzz/Cargo.toml --check && echo "fmt: every file is formatted"
}

contract_tools() {
  debian_tool strace strace
  debian_tool ip iproute2
  debian_tool nginx nginx-light
  debian_tool haproxy haproxy
  debian_tool caddy caddy
  debian_tool systemd-analyze systemd
  debian_tool curl curl
  debian_tool node nodejs
}

# Installations that are slow but need little processor time, while other suites compile. If something cannot be
# installed, the suite that needs it reports that.
suite_tools() {
  contract_tools
  debian_tool openssl openssl
  debian_tool promtool prometheus
  tests/clients/run --install
  tests/browser/run --install
  scripts/backends/wheel
  tool cargo-nextest
  tool mdbook
  true
}

suite_chart-programs() { scripts/chart install; }

# PROFILE ARGUMENTS...: runs the tests that a filter selects, from the binaries that `build` made, or the suite BUILT. The
# profiles are in .config/nextest.toml.
run_tests() {
  local profile=$1
  shift
  tool cargo-nextest || return
  # Thousands of connections at once, on either side; a shell's usual limit is 1,024.
  [ "$(ulimit -n)" = unlimited ] || [ "$(ulimit -n)" -ge 8192 ] || ulimit -n 8192 2> /dev/null
  cargo-nextest nextest run --binaries-metadata "$suites/${BUILT:-build}.json" --cargo-metadata "$suites/metadata.json" --profile "$profile" "$@"
}

# Not in `unit`, because each has a suite of its own.
BLACK_BOXES='package(modelrelay-contract) | package(modelrelay-backends)'
# Random histories of the two pure cores, and of a slot with its driver; every history of small worlds; whole fleets, queues
# of a hundred thousand requests; figures of the multiplexer's policy. Seconds of processor time each.
LONG='test(/dispatch::tests::(history|scale)::/)
  | (package(modelrelay-multiplexer) & test(/^(machine::tests::history|actor::tests::world)/))
  | (package(modelrelay-bench) & binary(/^(figures|fleets)$/))'

suite_unit() {
  run_tests unit -E "not ($BLACK_BOXES | $LONG)" && linting_cargo test --workspace "${MORE[@]/#/--exclude=}" --doc --locked --quiet
}

# Each random or complete exploration prints its number of transitions. These lines are counted, because a filter that matches
# no test passes too.
suite_histories() {
  MODELRELAY_HISTORY_TRANSITIONS=$HISTORY_TRANSITIONS run_tests histories --success-output final -E "$LONG" 2>&1 |
    awk '{ print } / transitions$/ { found++ } END { exit found != 9 }'
}

# Black box. A test that cannot run on this machine prints the reason in one line, and fails under CI=true.
# PARTITION=1/3 runs a third of them.
suite_contract() {
  contract_tools
  run_tests contract ${PARTITION:+--partition count:$PARTITION} -E 'package(modelrelay-contract) & !binary(speed)'
}

# The benchmark's bytes, and the instructions per request and per token against bench/baseline.json, for the release
# builds.
suite_speed() {
  debian_tool valgrind valgrind
  local folder=$suites/released
  mkdir -p "$folder"
  ln -sf "$PWD"/target/images/bin/modelrelay-{relay,worker} "$target/debug/modelrelay-bench" "$folder/"
  MODELRELAY_BIN_DIR=$folder run_tests speed -E 'package(modelrelay-contract) & binary(speed)'
}

# Under faults and overload, with every request accounted for. Some scenarios need root: they use their own networks and
# mounts, iptables, tc, a cgroup. MODELRELAY_CHAOS_FACTOR multiplies the number of faults, MODELRELAY_SOAK_MINUTES sets
# the time, and MODELRELAY_CHAOS_SEED repeats the random choices of a run.
suite_chaos() {
  debian_tool ip iproute2
  debian_tool iptables iptables
  BUILT=build-more run_tests chaos -E 'package(modelrelay-chaos)'
}

suite_soak() { BUILT=build-more run_tests chaos -E 'package(modelrelay-chaos) & test(soak)'; }

# Always the same seeds, so that a failure is caused by the change; `make simulation` uses others.
suite_simulation() {
  scripts/simulation test && SEEDS=$SEEDS FIRST_SEED=1 scripts/simulation run
}

# The specification of the grants protocol: small worlds, seeded bugs, and traces of the simulation.
suite_spec() { tests/spec/run; }

suite_clients() { tests/clients/run; }

suite_browser() { tests/browser/run; }

suite_docs() {
  debian_tool ip iproute2
  debian_tool curl curl
  debian_tool openssl openssl
  scripts/docs test
}

suite_chart() { scripts/chart; }

# Archives in target/images, for the cluster. Its tests check that the Dockerfiles make the same images.
suite_images() { scripts/images; }

suite_cluster-programs() {
  [ "$(uname -s)" = Linux ] && is_root || { echo "cannot run: a cluster needs Linux, with root"; return "$CANNOT_RUN"; }
  scripts/cluster/build
}

suite_cluster() {
  debian_tool prometheus prometheus
  debian_tool buildah buildah
  MODELRELAY_IS_BUILT=true tests/cluster/run
}

# The tests of the worker with a real engine that need only llama.cpp's server from a wheel, without its router mode.
suite_engine() {
  local folder
  folder=$(scripts/backends/wheel) || return
  MODELRELAY_BACKENDS=$folder run_tests engine -E 'package(modelrelay-backends) & (
    (binary(plain) & test(/^llama::/)) | (binary(workers) & not test(/^(ollama|router)::/)) | (binary(drivers) & test(/^every::process::/)))'
}

suite_engine-programs() { scripts/backends/build; }

suite_vllm-programs() { scripts/backends/vllm; }

suite_backends() {
  local folder
  folder=$(scripts/backends/build) || return
  MODELRELAY_BACKENDS=$folder scripts/backends/vllm run bash -c '. scripts/suites.bash && run_tests backends -E "package(modelrelay-backends)"'
}

# Measures what later turns of conversations find in the prompt caches of two llama-servers and two vLLMs: the table of
# docs/placement.md.
suite_placement() {
  local programs vllm
  programs=$(scripts/backends/build) && vllm=$(scripts/backends/vllm) || return
  MODELRELAY_BACKENDS=$programs MODELRELAY_VLLM=$vllm \
    run_tests backends --run-ignored only --no-capture -E 'package(modelrelay-backends) & test(/^placement::/)'
}

# Runs a test for two minutes that `backends` runs for some seconds: a model under saturation keeps its throughput while
# another is loaded too.
suite_saturated() {
  local folder
  folder=$(scripts/backends/build) || return
  MODELRELAY_BACKENDS=$folder run_tests backends --run-ignored only --no-capture -E 'package(modelrelay-backends) & binary(workers)'
}

# Lints, and tests of the programs under Wine.
suite_windows() {
  rustup_component clippy clippy || return
  scripts/windows
}

suite_wheel() { scripts/wheel; }

suite_autobahn() { tests/autobahn/run; }

suite_workflows() { scripts/workflows; }

suite_fuzz() {
  debian_tool g++ g++
  scripts/fuzz smoke
}

# Licences, banned libraries, their sources, and known vulnerabilities, according to deny.toml.
suite_deny() {
  tool cargo-deny || return
  cargo deny --locked check bans licenses sources || return
  local words
  words=$(cargo deny --locked check advisories 2>&1) && echo "$words" && return
  if grep -q "failed to fetch advisory database" <<< "$words"; then
    echo "deny: cannot fetch the advisory database on this machine; advisories were not checked"
    return
  fi
  echo "$words"
  return 1
}

rustup_component() {
  cargo "$1" --version > /dev/null 2>&1 && return
  if command -v rustup > /dev/null && rustup component add "$2"; then return; fi
  echo "cannot run: cargo $1 is missing, and rustup is not available to install it"
  return "$CANNOT_RUN"
}
