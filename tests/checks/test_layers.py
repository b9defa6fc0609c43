"""Tests of scripts/layers.py, each on a small crate written for it."""

import contextlib
import io
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import layers


class Layers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def crate(self, **files):
        """Writes the files of a crate, with `__` for the folders in their names, and reads it."""
        for name, text in {"lib": "", **files}.items():
            path = self.root / "relay/src" / (name.replace("__", "/") + ".rs")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return layers.Crate("relay", self.root)

    def imports(self, crate):
        return {f"{crate.file(source)} {crate.file(target)}" for source, target in crate.imports}

    def check(self, crate, circle=0):
        """Returns the problems and the output with this limit."""
        printed = io.StringIO()
        with mock.patch.dict(layers.LARGEST_CIRCLE, relay=circle), contextlib.redirect_stdout(printed):
            return "\n".join(layers.check(crate, False)), printed.getvalue()

    def test_use_tree_yields_each_of_its_paths(self):
        def read(code):
            return ["::".join(path) for path in layers.path_tree(code, 0)]

        self.assertEqual(read("crate::{a::{b, c as d}, e::{self, f}, g};"), ["crate::a::b", "crate::a::c", "crate::e::self", "crate::e::f", "crate::g"])
        self.assertEqual(read("crate::{\n    a::*,\n    b,\n};"), ["crate::a::*", "crate::b"])
        self.assertEqual(read("crate::a::b(c::d)"), ["crate::a::b"])

    def test_path_resolves_to_the_deepest_module_file(self):
        crate = self.crate(provider="pub use details::Details;", provider__details="", http="use crate::provider::{Details, details::Other::New};")
        self.assertEqual(self.imports(crate), {"http.rs provider.rs", "http.rs provider/details.rs"})

    def test_super_resolves_from_the_enclosing_module(self):
        crate = self.crate(
            http="fn f() { super::routing::g() }", routing="", http__auth="use super::super::keys::Key; use super::parse;", http__parse="", keys="",
            net="mod simulated {\n    use super::super::tls;\n    use super::listen;\n}", tls="")
        self.assertEqual(self.imports(crate), {
            "http.rs routing.rs", "http/auth.rs keys.rs", "http/auth.rs http/parse.rs", "net.rs tls.rs"})

    def test_comments_strings_and_tests_import_nothing(self):
        crate = self.crate(
            http="//! [`crate::keys`]\n/* crate::keys */\nconst A: &str = \"crate::keys\";\nconst B: &str = r#\"\"crate::keys\"#;\n"
                 "const C: char = '\"'; fn f<'a>() {}\n#[cfg(test)]\nfn g() { crate::keys::h() }\n#[cfg(test)]\nmod testing;\n"
                 "#[cfg(test)]\nmod tests {\n    use crate::keys;\n    mod inner { }\n    use crate::keys::A;\n}\nuse crate::tls;",
            http__testing="use crate::keys;", http__testing__more="use crate::keys;", keys="", tls="")
        self.assertEqual(self.imports(crate), {"http.rs tls.rs"})

    def test_circle_above_its_limit_fails(self):
        crate = self.crate(
            settings="use crate::http::A;", http="use crate::system::A;", system="use crate::settings::A;\nuse crate::settings::B;", net="use crate::http;")
        problems, printed = self.check(crate, circle=2)
        self.assertIn("files in the largest circle: 3, limit 2", problems)
        self.assertIn("a circle of 3 files: http.rs settings.rs system.rs\n  cut http.rs:1 → system.rs (1 import): leaves no circle", printed)
        self.assertEqual(self.check(crate, circle=3)[0], "")
        self.assertIn("lower LARGEST_CIRCLE from 4 to 3", self.check(crate, circle=4)[1])

    def test_parent_and_child_form_no_circle(self):
        crate = self.crate(keys="use crate::keys::file::A;", keys__file="use super::B;")
        self.assertEqual(crate.circles(), [])

    def test_one_way_imports_form_no_circle(self):
        edges = {(1, 2), (2, 1), (2, 3), (3, 4), (4, 5), (5, 3), (6, 1)}
        self.assertEqual(layers.components(edges), [{3, 4, 5}, {1, 2}])

    def test_import_against_the_layers_fails(self):
        crate = self.crate(
            settings="use crate::provider;", provider="use crate::settings;", clients="use crate::{admin, provider};", admin="",
            app="use crate::{clients, admin};", dashboard="use crate::clients;", dispatch="", telemetry="use crate::dispatch;")
        found = crate.against_layers()
        self.assertEqual([line.split(" (")[0] for line in found], ["clients.rs:1 → admin.rs", "dashboard.rs:1 → clients.rs", "settings.rs:1 → provider.rs"])
        self.assertEqual(self.check(crate, circle=2)[0].splitlines(), [f"relay: against the layers: {line}" for line in found])
        self.assertEqual(found[0], "clients.rs:1 → admin.rs (clients → admin)")

    def test_file_without_a_layer_fails(self):
        self.assertIn("novelty.rs has no layer", self.check(self.crate(novelty="", clients__intake=""))[0])

    def test_duplicate_type_name_fails(self):
        crate = self.crate(
            keys="pub(crate) struct Key<'a>(&'a str);\nimpl Iterator for Key {\n    type Item = u8;\n}",
            net="enum Key {}\n#[cfg(unix)]\nstruct Once;\n#[cfg(windows)]\nstruct Once;\nimpl Iterator for Once {\n    type Item = u8;\n}",
            http="type Key = u8;\n#[cfg(test)]\nmod tests {\n    struct Once;\n}")
        self.assertEqual(self.check(crate)[0], "relay: the type Key is defined in http.rs and keys.rs and net.rs: rename one")
