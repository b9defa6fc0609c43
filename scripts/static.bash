# The programs as static ones, for scripts/images and scripts/release. Sourced in the root of the repository.

CARGO_AUDITABLE=0.7.7
cache=${XDG_CACHE_HOME:-$HOME/.cache}/modelrelay
. scripts/cargo_tool.bash

# FOLDER PROGRAM...: relay, worker or operator, each as FOLDER/modelrelay-PROGRAM. By the build that `make` does everywhere, to
# which scripts/rustc-static adds; and each with the list of its libraries in it, for `cargo audit bin` and for scanners.
build_static() {
  local folder=$1 program
  shift
  mkdir -p "$folder"
  cargo_tool cargo-auditable "$CARGO_AUDITABLE"
  for program; do outdate "$folder" "$program"; done
  RUSTC_WRAPPER=$PWD/scripts/rustc-static STATIC_DIR=$PWD/$folder AUDITABLE=$(command -v cargo-auditable) \
    cargo build --release --locked --quiet --workspace --bins
  for program; do check_static "$folder/modelrelay-$program"; done
}

# Makes cargo compile a program's last crate again where the static one is missing, or is not of the same build.
outdate() {
  local static=$1/modelrelay-$2 folder=$2
  [ "$2" != worker ] || folder=worker-sidecar
  if [ ! -f "$static" ] || [ "target/release/modelrelay-$2" -nt "$static" ] || ! is_auditable "$static"; then
    touch "$folder/src/main.rs"
  fi
}

check_static() {
  # All of it is read: a `grep -q` that leaves early would end the program before it, and with pipefail the whole.
  if [[ $(ldd "$1" 2> /dev/null) == *'=>'* ]]; then
    echo "$1 is not static" >&2
    return 1
  fi
  is_auditable "$1" || { echo "$1 does not list its libraries" >&2; return 1; }
}

is_auditable() { [[ $(readelf --sections --wide "$1" 2> /dev/null) == *.dep-v0* ]]; }
