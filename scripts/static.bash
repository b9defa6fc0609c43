# Builds static programs, and images of them, for scripts/images and scripts/release. Sourced in the root of the
# repository.

CERTIFICATES=/etc/ssl/certs/ca-certificates.crt # the build machine's trusted certificates, for relays and backends behind TLS
. scripts/debian.bash
. scripts/tools.bash

host() { rustc -vV | sed -n 's/^host: //p'; }

# FOLDER TARGET PROGRAM...: builds relay, worker or operator as FOLDER/modelrelay-PROGRAM. Each contains the list of its
# libraries, for `cargo audit bin` and for scanners.
build_static() {
  local folder=$1 target=$2 program
  shift 2
  mkdir -p "$folder"
  tool cargo-auditable
  build_for "$target" "${@/#/modelrelay-}"
  for program; do
    cp "${CARGO_TARGET_DIR:-target}/$target/release/modelrelay-$program" "$folder/"
    check_static "$folder/modelrelay-$program"
  done
}

# TARGET: finds or fetches the compiler for it.
cross_compiler() {
  local target=$1 processor=${1%%-*}
  debian_tool "$processor-linux-gnu-gcc" "gcc-${processor/_/-}-linux-gnu"
  has "$processor-linux-gnu-gcc" || { echo "$processor-linux-gnu-gcc is missing: install a C compiler for $target" >&2; return 1; }
  # The target's libc, which the compiler only recommends.
  [ -e "/usr/$processor-linux-gnu/lib/libc.a" ] || apt_install "libc6-dev-$(debian_name "$processor")-cross"
  rustup target list --installed | grep -qxF "$target" || rustup target add "$target"
}

# TARGET PACKAGE...
build_for() {
  local target=$1 settings=() setting
  shift
  while read -r setting; do settings+=("$setting"); done < <(static_settings "$target")
  env "${settings[@]}" cargo auditable build --release --locked --quiet --target "$target" --bins "${@/#/--package=}"
}

# TARGET: prints the variables, one per line, that make cargo build a static program for it. They need --target even for
# this machine's own processor, so that build scripts and macros are not linked statically.
static_settings() {
  local name=${1//-/_}
  echo "CARGO_TARGET_${name^^}_RUSTFLAGS=-C target-feature=+crt-static -C strip=debuginfo${REPEATABLE:+$(remapped_paths)}"
  # Stripped anyway, and a tenth of the time that compiling takes.
  echo CARGO_PROFILE_RELEASE_DEBUG=none
  [ "$1" = "$(host)" ] || echo "CARGO_TARGET_${name^^}_LINKER=${1%%-*}-linux-gnu-gcc"
  page_size "$1"
}

# Prints rustc's options that keep this machine's paths out of a program, so that it is the same wherever it is built. Set
# REPEATABLE for releases only: with these options, a clone in another folder compiles every library again. The last
# option that matches a path applies. cargo splits them at spaces, so paths with one are kept.
remapped_paths() {
  local toolchain from to
  toolchain=$(rustc -vV | sed -n 's/^commit-hash: //p')
  while IFS='|' read -r from to; do
    [[ $from == *[[:space:]]* ]] || printf ' --remap-path-prefix=%s=%s' "$from" "$to"
  done << LIST
${CARGO_HOME:-$HOME/.cargo}|/cargo
$(rustc --print sysroot)/lib/rustlib/src/rust|/rustc/$toolchain
$PWD|/modelrelay
$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")|/modelrelay/target
LIST
}

# TARGET: settings of the allocator. Kernels of aarch64 may have pages of 64 KiB, and an allocator built for smaller
# ones does not start there.
page_size() { case $1 in aarch64-*) echo JEMALLOC_SYS_WITH_LG_PAGE=16 ;; esac; }

# TARGET or its processor: prints the name that Debian and container images use.
debian_name() { case ${1%%-*} in x86_64) echo amd64 ;; aarch64) echo arm64 ;; *) echo "${1%%-*}" ;; esac; }

check_static() {
  # Reads the whole output: a `grep -q` that exits early would kill the program before it, and with pipefail fail the
  # pipeline.
  if [[ $(readelf --dynamic --wide "$1") == *'(NEEDED)'* ]]; then
    echo "$1 is not static" >&2
    return 1
  fi
  is_auditable "$1" || { echo "$1 does not list its libraries" >&2; return 1; }
}

is_auditable() { [[ $(readelf --sections --wide "$1" 2> /dev/null) == *.dep-v0* ]]; }

# PROGRAM FOLDER TARGET TAG FILE: packs a static program in FOLDER as an OCI archive, with the settings of its
# Dockerfile.
pack_image() {
  local name=modelrelay-$1 folder=$2 target=$3 tag=$4 file=$5 files=("$2/modelrelay-$1=/modelrelay-$1") labels
  if [ -r "$CERTIFICATES" ]; then
    cp "$CERTIFICATES" "$folder/ca-certificates.crt"
    files+=("$folder/ca-certificates.crt:644=$CERTIFICATES")
  fi
  labels=$(sed -n 's/^LABEL //p' "deploy/docker/Dockerfile.$1" | tr -d '"')
  LABELS=$labels ARCHITECTURE=$(debian_name "$target") scripts/cluster/image "$file" "localhost/$name:$tag" "/$name" "${files[@]}"
}
