"""Tests the wheel in an empty environment, and the files published with it. scripts/wheel builds it and sets WHEEL to its path."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import unittest
import urllib.request
import zipfile
from pathlib import Path

import second_try

ROOT = Path(__file__).resolve().parents[2]
# The platforms in names of wheels.
WHEELS = {
    "x86_64-unknown-linux-gnu": "manylinux2014_x86_64.manylinux_2_17_x86_64.musllinux_1_1_x86_64",
    "aarch64-unknown-linux-gnu": "manylinux2014_aarch64.manylinux_2_17_aarch64.musllinux_1_1_aarch64",
    "x86_64-pc-windows-gnu": "win_amd64",
    "aarch64-apple-darwin": "macosx_11_0_arm64",
    "x86_64-apple-darwin": "macosx_10_12_x86_64",
}
WHEEL = Path(os.environ["WHEEL"]).resolve()
TIMEOUT = 60
# From the command to the greeting, with a cold cache of uv. A hang fails, a busy machine does not.
FIRST_MINUTE = 60
QUIET = {"BACKEND_PORTS": "1", "LISTEN_ADDR": "127.0.0.1:0"}


def run(*words, **options):
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=TIMEOUT, **options).stdout


class Up:
    """A running `modelrelay up`."""

    def __init__(self, test, *command, **environment):
        self.log = tempfile.TemporaryFile("w+b")
        environment = {**os.environ, **QUIET, **environment}
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=environment)
        test.addCleanup(self.kill)

    def printed(self):
        return os.pread(self.log.fileno(), 1 << 20, 0).decode(errors="replace")

    def url(self):
        end = time.monotonic() + FIRST_MINUTE
        while "Stop with Ctrl-C" not in self.printed():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"no greeting:\n{self.printed()}")
            time.sleep(0.05)
        return re.search(r"curl -N (http://\S+)", self.printed())[1]

    def first_response(self):
        body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "Say hello"}]}
        request = urllib.request.Request(self.url(), json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as stream:
            return stream.read().decode()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


class Wheel(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_fits_any_linux_of_its_processor(self):
        self.assertRegex(WHEEL.name, r"^modelrelay_gpu-[\d.]+-py3-none-manylinux2014_(\w+)\.manylinux_2_17_\1\.musllinux_1_1_\1\.whl$")

    def test_program_is_static_and_has_its_licences(self):
        with zipfile.ZipFile(WHEEL) as wheel:
            names = wheel.namelist()
            program = wheel.extract(next(name for name in names if name.endswith(".data/scripts/modelrelay")), self.folder)
        self.assertNotIn("(NEEDED)", run("readelf", "--dynamic", "--wide", program))
        for licence in "LICENSE-APACHE", "LICENSE-MIT":
            self.assertTrue(any(name.endswith(f".dist-info/licenses/{licence}") for name in names), names)

    def test_installed_program_streams_a_response_and_stops(self):
        run("uv", "venv", "--quiet", "--no-project", self.folder / "venv")
        run("uv", "pip", "install", "--quiet", "--offline", "--no-index", "--python", self.folder / "venv", WHEEL)
        program = self.folder / "venv/bin/modelrelay"
        up = Up(self, program, "up")
        self.assertTrue(up.first_response().rstrip().endswith("data: [DONE]"))
        up.process.send_signal(signal.SIGINT)
        self.assertEqual(up.process.wait(TIMEOUT), 0, up.printed())
        self.assertIn("modelrelay: stopped", up.printed())
        self.assertRegex(run(program, "worker", "--version"), r"^modelrelay-worker \d")

    def test_one_uvx_line_is_enough(self):
        began = time.monotonic()
        words = ["uv", "tool", "run", "--offline", "--no-index", "--from", WHEEL, "modelrelay", "up"]
        up = Up(self, *words, UV_CACHE_DIR=str(self.folder))
        response = up.first_response()
        print(f"uvx: {time.monotonic() - began:.1f} s to the end of the first response", file=sys.stderr)
        self.assertTrue(response.rstrip().endswith("data: [DONE]"))
        up.process.terminate()
        self.assertEqual(up.process.wait(TIMEOUT), 0, up.printed())


class Published(unittest.TestCase):
    def test_metadata_is_accepted_by_twine(self):
        checked = run("twine", "check", "--strict", WHEEL)
        self.assertIn("PASSED", checked)

    def test_formula_names_the_archives_of_the_release(self):
        with tempfile.TemporaryDirectory() as folder:
            archives = [f"{'0' * 64}  modelrelay-{version()}-{target}.tar.gz" for target in targets("tar.gz")]
            others = [f"{'1' * 64}  modelrelay-relay-{version()}-{target}.tar.gz" for target in targets("tar.gz")]
            Path(folder, "SHA256SUMS").write_text("\n".join(archives + others) + "\n")
            formula = run(ROOT / "scripts/formula", folder, "https://example.org/o/r/releases/download/v1")
            Path(folder, "modelrelay.rb").write_text(formula)
            self.assertEqual(formula.count("0" * 64), 4)
            self.assertNotIn("1" * 64, formula)
            if shutil.which("ruby"):
                self.assertIn("Syntax OK", run("ruby", "-c", Path(folder, "modelrelay.rb")))
            else:
                print("cannot run: ruby is missing, so nothing read the formula", file=sys.stderr)
                self.assertNotEqual(os.environ.get("CI"), "true")

    def test_each_file_has_one_bill_of_materials(self):
        with tempfile.TemporaryDirectory() as folder:
            number = version()
            bills = {f"modelrelay-{number}-{target}.cdx.json": set() for target in [*targets("tar.gz"), *targets("zip")]}
            for suffix in ["tar.gz", "zip"]:
                for target in targets(suffix):
                    bills[f"modelrelay-{number}-{target}.cdx.json"].add(f"modelrelay-{number}-{target}.{suffix}")
            for target, platform in WHEELS.items():
                bills[f"modelrelay-{number}-{target}.cdx.json"].add(f"modelrelay_gpu-{number}-py3-none-{platform}.whl")
            for name, target in [("amd64", "x86_64"), ("arm64", "aarch64")]:
                image = f"modelrelay-relay-{number}-linux-{name}.image.tar"
                bills[f"modelrelay-relay-{number}-{target}-unknown-linux-gnu.cdx.json"] = {image}
            others = [f"modelrelay-{number}.tgz", "modelrelay.rb", f"modelrelay-operator-{number}-x86_64-unknown-linux-gnu.cdx.json"]
            names = [*others, *bills, *set().union(*bills.values())]
            Path(folder, "SHA256SUMS").write_text("".join(f"{'0' * 64}  {name}\n" for name in names))
            listed = json.loads(run(ROOT / "scripts/bills", folder))
            described = {entry["bill"]: set(re.findall(r"  (\S+)\n", entry["subjects"])) for entry in listed}
            self.assertEqual(described, bills)

    def test_same_files_give_identical_archives(self):
        for suffix in ["tar.gz", "zip"]:
            packed = []
            for moment in [1, 2]:
                with tempfile.TemporaryDirectory() as folder:
                    files = Path(folder, "some")
                    Path(files, "man").mkdir(parents=True)
                    for name in ["program", "man/page"][:: 1 if moment == 1 else -1]:
                        Path(files, name).write_text(name)
                        os.utime(Path(files, name), (moment, moment))
                    Path(files, "program").chmod(0o755 if moment == 1 else 0o775)
                    archive = Path(folder, f"some.{suffix}")
                    run(ROOT / "scripts/archive", files, archive)
                    packed.append(archive.read_bytes())
                    shutil.unpack_archive(archive, folder + "/out")
                    self.assertEqual(Path(folder, "out/some/man/page").read_text(), "man/page")
            self.assertEqual(packed[0], packed[1])

    def test_binstall_names_the_archives_of_the_release(self):
        package = tomllib.loads((ROOT / "relay/all-in-one/Cargo.toml").read_text())
        metadata = package["package"]["metadata"]["binstall"]
        for target in ["x86_64-pc-windows-msvc", *targets("tar.gz"), *targets("zip")]:
            settings = {**metadata, **metadata["overrides"].get(target, {})}
            suffix = {"tgz": "tar.gz", "zip": "zip"}[settings["pkg-fmt"]]
            built = target.replace("-msvc", "-gnu")
            self.assertIn(built, targets(suffix), "an archive of this kind")
            folder = f"modelrelay-{version()}-{built}"
            self.assertEqual(filled(settings["pkg-url"], target), f"REPO/releases/download/v{version()}/{folder}.{suffix}")
            self.assertEqual(filled(settings["bin-dir"], target), f"{folder}/modelrelay{'.exe' if suffix == 'zip' else ''}")

    def test_no_page_installs_packages_of_others(self):
        """`modelrelay` on PyPI and crates.io is not this project."""
        files = run("git", "-C", ROOT, "ls-files", "-z", "*.md", "*.toml", "*.yaml", "*.yml", "*.js", "*.rs", "scripts").split("\0")
        bad = re.compile(r"\b(?:pip|pipx|uv|cargo)\b[^\n|`]*\b(?:install|binstall|add)\b[^\n`|]* modelrelay(?=[\s`=\[]|$)|\buvx modelrelay\b", re.M)
        found = [f"{file}: {line[0]}" for file in filter(None, files) for line in bad.finditer((ROOT / file).read_text(errors="replace"))]
        self.assertEqual(found, [])
        for line in "pip install modelrelay", "uvx modelrelay up", "cargo install --locked modelrelay", "uv tool install modelrelay==1":
            self.assertRegex(line, bad)


def version():
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def targets(suffix):
    """Returns the targets for which scripts/release and release.yml make archives of this kind, named PROGRAM-VERSION-TARGET."""
    release, workflow = (ROOT / "scripts/release").read_text(), (ROOT / ".github/workflows/release.yml").read_text()
    assert "name=$program-$version-$2\n" in release and workflow.count("name=$program-$VERSION-$TARGET\n") == 2
    if suffix == "zip":
        return re.findall(r"TARGET: (\S+-windows-\S+)", workflow)
    return re.search(r'^TARGETS="(.*)"', release, re.M)[1].split() + re.findall(r"target: (\S+-apple-\S+)\}", workflow)


def filled(template, target):
    """Expands a template like cargo-binstall, as far as these use it."""
    fields = {"repo": "REPO", "version": version(), "target": target, "bin": "modelrelay"}
    fields["binary-ext"] = ".exe" if "windows" in target else ""
    return re.sub(r"\{ ([\w-]+) \}", lambda name: fields[name[1]], template)


if __name__ == "__main__":
    second_try.main()
