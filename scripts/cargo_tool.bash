# Cargo's own tools, for the scripts that need one. Sourced with $cache set to the cache folder.

# NAME VERSION: puts that version of a tool of crates.io into PATH, built once per version.
cargo_tool() {
  local folder=$cache/$1-$2
  PATH=$folder/bin:$PATH
  [ -x "$folder/bin/$1" ] && return
  mkdir -p "$cache"
  # Two of these at once would do the same work twice.
  (
    flock 9 2> /dev/null
    [ -x "$folder/bin/$1" ] && exit
    printf 'building %s %s: minutes, the first time\n' "$1" "$2" >&2
    cargo install --quiet --locked --root "$folder" "$1@$2"
  ) 9> "$cache/$1.lock"
}
