# The names and the contents of a release's files, for scripts/release, scripts/publish and scripts/reproducible. Sourced
# in the root of the repository.
# shellcheck shell=bash

ARCHITECTURES="amd64 arm64"
IMAGES="relay worker operator"
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)

# Prints the time that files of a release have: that of the last commit, unless SOURCE_DATE_EPOCH is set.
last_change() { echo "${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2> /dev/null || echo 0)}"; }

# FOLDER PROGRAM ARCHITECTURE
image_archive() { echo "$1/modelrelay-$2-$version-linux-$3.image.tar"; }

# FOLDER PROGRAM: prints the index of a program's images of all processors. Its digest, which is the image's digest in
# every registry, is known before anything is pushed.
image_index() {
  local architecture digest size manifests=""
  for architecture in $ARCHITECTURES; do
    read -r digest size < <(tar -xOf "$(image_archive "$1" "$2" "$architecture")" index.json | sed -n 's/.*"digest":"\([^"]*\)","size":\([0-9]*\).*/\1 \2/p')
    manifests+=${manifests:+,}$(printf '{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"%s","size":%d,"platform":{"architecture":"%s","os":"linux"}}' "$digest" "$size" "$architecture")
  done
  printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[%s]}' "$manifests"
}

# FOLDER PROGRAM
image_digest() { echo "sha256:$(image_index "$1" "$2" | sha256sum | cut -d' ' -f1)"; }

# FOLDER: packs the chart into it. If FOLDER has the images of all processors, the chart names their digests; if
# IMAGE_REGISTRY is set, that registry. Helm stores the files' modification times, and otherwise writes the same bytes
# for the same files.
package_chart() {
  local program helm work digests=""
  scripts/cluster/build helm4
  helm=$(. scripts/cluster/common.bash && echo "$bin")/helm4
  work=$(mktemp -d)
  cp -R charts/modelrelay "$work"
  for program in $IMAGES; do
    [ ! -e "$(image_archive "$1" "$program" arm64)" ] || digests+=${digests:+, }"$program: $(image_digest "$1" "$program")"
  done
  sed -i -e "s|^  digests: {}$|  digests: {$digests}|" -e "s|^  registry: localhost$|  registry: ${IMAGE_REGISTRY:-localhost}|" "$work/modelrelay/values.yaml"
  find "$work" -exec touch --date "@$(last_change)" {} +
  "$helm" package "$work/modelrelay" --destination "$1" > /dev/null
  rm -r "$work"
}
