//! Passes the compiler's version to the program, for `modelrelay_build_info`.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Set by release builds; read by the program at compile time.
    println!("cargo::rerun-if-env-changed=MODELRELAY_REVISION");
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().ok().filter(|output| output.status.success());
    if let Some(text) = version.and_then(|output| String::from_utf8(output.stdout).ok()) {
        // "rustc 1.89.0 (…)": the number is enough.
        println!("cargo::rustc-env=MODELRELAY_RUSTC={}", text.split_whitespace().nth(1).unwrap_or("unknown"));
    }
}
