# What the scripts share that need a tool of Debian. Sourced.

has() { command -v "$1" > /dev/null; }

is_root() { [ "$(id -u)" = 0 ]; }

# PACKAGE...: installs them, where that needs nobody's leave. Elsewhere whoever wants them says what is missing.
apt_install() {
  is_root && has apt-get || return 0
  local quiet=(env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -qq -y --no-install-recommends "$@")
  # apt-get waits for another that installs, not for one that updates the lists: suites that run side by side take turns.
  (
    flock 9 2> /dev/null
    "${quiet[@]}" || { apt-get update -qq && "${quiet[@]}"; }
  ) 9> "${TMPDIR:-/tmp}/modelrelay-apt.lock" > /dev/null 2>&1 || true
}

# PROGRAM PACKAGE: installs the package, if the program is missing.
debian_tool() { has "$1" || apt_install "$2"; }

# FOLDER: makes a virtual environment of Python. ensurepip is what Debian's python3 lacks until python3-venv is there.
make_venv() {
  has python3 || apt_install python3
  python3 -c 'import ensurepip, venv' 2> /dev/null || apt_install python3-venv
  python3 -m venv "$1"
}
