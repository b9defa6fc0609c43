# Shared by the scripts that need a tool of Debian. Sourced.

has() { command -v "$1" > /dev/null; }

is_root() { [ "$(id -u)" = 0 ]; }

# PACKAGE...: installs them where that needs no permission. Elsewhere the caller reports what is missing.
apt_install() {
  is_root && has apt-get || return 0
  local quiet=(env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -qq -y --no-install-recommends "$@")
  # apt-get waits for another installation, but not for an update of the lists: parallel suites run one after the other.
  (
    flock 9 2> /dev/null
    "${quiet[@]}" || { apt-get update -qq && "${quiet[@]}"; }
  ) 9> "${TMPDIR:-/tmp}/modelrelay-apt.lock" > /dev/null 2>&1 || true
}

# PROGRAM PACKAGE: installs the package, if the program is missing.
debian_tool() { has "$1" || apt_install "$2"; }

# FOLDER: creates a Python virtual environment. Debian's python3 lacks ensurepip until python3-venv is installed.
make_venv() {
  has python3 || apt_install python3
  python3 -c 'import ensurepip, venv' 2> /dev/null || apt_install python3-venv
  python3 -m venv "$1"
}
