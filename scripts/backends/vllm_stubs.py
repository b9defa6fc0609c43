"""Writes stand-ins for NVIDIA's libraries, so that PyPI's torch can be imported without them.

PyPI has torch for Linux on x86_64 only as a build for CUDA. That build also computes on a processor, but it links to 2.5 GB of
NVIDIA's libraries. A stand-in defines every function that torch imports from the library whose name it has. Each function
returns CUDA's error 100: no device.

    vllm_stubs.py SITE_PACKAGES      needs gcc, nm and readelf
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

# The names of NVIDIA's libraries and functions. The driver's libcuda.so is left out: torch loads it only where it exists.
LIBRARY = re.compile(r"NEEDED.*\[(lib(?:cu|nv|nccl)(?!da\.so).+)\]")
FUNCTION = re.compile(r"_*(?:cu|nv|p?nccl)\w+")


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def survey(folder):
    """Returns the libraries that torch's own libraries need, and the functions that they import, by symbol version."""
    libraries, imported, defined = set(), collections.defaultdict(set), set()
    for path in folder.glob("*.so*"):
        libraries.update(LIBRARY.findall(output("readelf", "--dynamic", "--wide", path)))
        for line in output("nm", "--dynamic", path).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            if kind not in "Uvw":
                defined.add(name)
            elif FUNCTION.fullmatch(name):
                imported[version].add(name)
    return libraries, {version: names - defined for version, names in imported.items()}


def build(path, version, functions):
    with tempfile.TemporaryDirectory() as folder:
        source, script = pathlib.Path(folder, "stub.c"), pathlib.Path(folder, "versions")
        aliases = (f'int {name}(void) __attribute__((alias("no_device")));\n' for name in sorted(functions))
        source.write_text("int no_device(void) { return 100; }\n" + "".join(aliases))
        script.write_text(f"{version} {{ global: {' '.join(f'{name};' for name in sorted(functions))} local: *; }};\n")
        options = ["-shared", "-fPIC", f"-Wl,-soname,{path.name}", f"-Wl,--version-script={script}"]
        subprocess.run(["gcc", *options, "-o", path, source], check=True)


def main(site_packages):
    folder = pathlib.Path(site_packages, "torch", "lib")
    libraries, imported = survey(folder)
    for name in libraries:
        # The version of a library's symbols is its name, with one exception. Libraries without versions share a list.
        version = "NVSHMEM" if name.startswith("libnvshmem") else name
        build(folder / name, version, imported.get(version, imported[""]))


if __name__ == "__main__":
    main(sys.argv[1])
