# What the scripts of this folder share: each fills a folder of the cache, once per version of its sources. Sourced.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../debian.bash"

CANNOT_RUN=77 # tells scripts/test that this machine cannot, rather than that something failed
cache=${XDG_CACHE_HOME:-$HOME/.cache}/modelrelay

say() { printf 'backends: %s\n' "$*" >&2; }

die() {
  say "$*"
  exit 1
}

# The machine lacks something that no script can change.
cannot() {
  printf 'cannot run: %s\n' "$*" >&2
  exit "$CANNOT_RUN"
}

# KIND SOURCE...: sets $home to the cache folder of this version of the sources, and runs `fill` unless it is complete. `fill` has
# a scratch folder in $work.
fill_once() {
  local kind=$1 version
  version=$(cd "$here" && cat cache.bash "${@:2}" | sha256sum) || exit
  home=$cache/$kind/${version:0:8}
  [ ! -e "$home/complete" ] || return 0
  mkdir -p "$home"
  # Two of these at once would do the same work twice.
  exec 9> "$cache/$kind/lock"
  flock 9 2> /dev/null
  if [ ! -e "$home/complete" ]; then
    work=$(mktemp -d "$cache/$kind/work.XXXXXX") || exit
    trap 'rm -rf "$work"' EXIT # also when it is interrupted
    fill
    touch "$home/complete"
    rm -rf "$work"
    trap - EXIT
  fi
  exec 9>&-
}

# NAME FUNCTION: runs the function in the folder $work and shows its output only when it fails.
logged() {
  local name=$1 began=$SECONDS code
  say "building $name: this takes minutes, the first time"
  # Before `||` or `if` the shell would ignore `set -e`.
  (set -e; cd "$work"; "$2") > "$work/log" 2>&1
  code=$?
  [ "$code" = 0 ] || { tail -n 30 "$work/log" >&2; die "cannot build $name: see above"; }
  say "built $name in $((SECONDS - began)) s"
}

# FOLDER REQUIREMENT...: makes a virtual environment with these packages, as pip is told them.
python_with() {
  has python3 || apt_install python3
  has python3 || cannot "python3 is missing: install it"
  make_venv "$1" || cannot "python3 cannot make a virtual environment: install its venv module"
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}" || die "cannot install ${*:2}"
}

# COMPILER: installs it where that is possible.
compiler() {
  has "$1" || apt_install "$1"
  has "$1" || cannot "a compiler is missing: install $1"
}

# PYTHON: writes the models of llama.cpp's servers, with the packages of this virtual environment.
gguf_models() {
  local model seed=0
  mkdir -p "$home/models"
  for model in tiny-a tiny-b tiny-c; do
    "$1/bin/python" "$here/make_model.py" "$home/models/$model.gguf" --name "$model" --seed "$((++seed))" || die "cannot make the model $model"
  done
}
