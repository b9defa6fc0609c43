# Go, for the scripts that build programs no package provides. Sourced after scripts/debian.bash; the caller defines
# `say`, `die` and `cannot`.

GO=1.26.8

# Sets $go to an installed Go, or to Debian's, which is too old but can fetch a newer toolchain as a module.
find_go() {
  export GOFLAGS=-mod=readonly GOWORK=off GOTOOLCHAIN=auto
  PATH=$PATH:/usr/local/go/bin
  has go || apt_install golang-go
  has go || cannot "Go is missing, and this is no Debian with root to fetch it from: install Go $GO or newer"
  go=go
  "$go" version | grep -qE ' go1\.([01]?[0-9]|20)[. ]' || return 0 # from 1.21 on it fetches a newer one by itself
  local arch
  arch=$(go env GOARCH)
  say "fetching the toolchain of Go $GO"
  local module=golang.org/toolchain@v0.0.1-go$GO.linux-$arch
  (cd / && GOFLAGS="" go mod download "$module") || die "cannot download $module"
  local folder
  folder=$(go env GOMODCACHE)/$module
  # Modules carry no file modes, and the cache is read-only.
  chmod -R u+w "$folder/bin" "$folder/pkg/tool" && chmod -R a+x "$folder/bin" "$folder/pkg/tool"
  go=$folder/bin/go
  export GOTOOLCHAIN=local
}
